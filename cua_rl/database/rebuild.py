"""Rebuilds recorded groups from the database alone, identical in every token, pixel and float.

Of pruned screenshots only the hashes are left: they are images without `data`, which nothing can look at by mistake.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.columns import decode_action, decode_more_actions, decode_prompt
from cua_rl.database.judge_models import JudgementRow, JudgePrompt
from cua_rl.database.models import Eval, Group, Replay, RolloutRow, Step, TaskRow, TurnRow, ValidationRow
from cua_rl.database.screenshots import load_images, named_image
from cua_rl.events import Phase
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.errors import DatabaseError
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import AgentTurn, ModelTurn, Reward, Rollout, RolloutGroup, StopReason, Turn


async def load_groups(
    session: AsyncSession, training_id: int, step: int, *, phase: Phase = "step"
) -> list[RolloutGroup]:
    """All ended groups of a step or evaluation, by index; raises `DatabaseError` if it was never recorded."""
    return await load_groups_by_key(session, await _load_group_rows(session, training_id, step, phase))


async def load_groups_by_key(
    session: AsyncSession, group_rows: Sequence[Group], *which: ColumnElement[bool]
) -> list[RolloutGroup]:
    """The groups of these rows, in the same order, with those of their rollouts that meet the conditions."""
    group_pks = [row.id for row in group_rows]
    members: dict[int, list[Rollout]] = defaultdict(list)
    query = select(RolloutRow).where(RolloutRow.group_pk.in_(group_pks), *which)
    for rollout, row in await _load_rollouts(session, query.order_by(RolloutRow.position, RolloutRow.id)):
        members[row.group_pk].append(rollout)
    replayed: dict[int, list[Rollout]] = defaultdict(list)
    replays = await _load_replays(session, group_pks)
    if replays:
        query = select(RolloutRow).where(RolloutRow.id.in_([replay.rollout_pk for replay in replays]))
        rollouts = {row.id: rollout for rollout, row in await _load_rollouts(session, query)}
        for replay in replays:
            replayed[replay.group_pk].append(rollouts[replay.rollout_pk])
    tasks = select(TaskRow.id, TaskRow.category).where(TaskRow.id.in_({row.task_pk for row in group_rows}))
    categories = {row.id: row.category for row in await session.execute(tasks)}
    return [
        RolloutGroup(
            group_id=row.group_id,
            index=row.group_index,
            task_id=row.task_id,
            seed=row.seed,
            rollouts=tuple(rollout for rollout in members[row.id] if rollout.reward is not None),
            faulty=tuple(rollout for rollout in members[row.id] if rollout.reward is None),
            replayed=tuple(replayed[row.id]),
            category=categories.get(row.task_pk, ""),
        )
        for row in group_rows
    ]


async def load_rollouts(session: AsyncSession, training_id: int, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Ended rollouts by id, in the order of the ids, without those whose screenshots were pruned; raises
    `DatabaseError` if one was never recorded.
    """
    query = select(RolloutRow).where(RolloutRow.training_id == training_id, RolloutRow.rollout_id.in_(rollout_ids))
    found = {rollout.rollout_id: (rollout, row) for rollout, row in await _load_rollouts(session, query)}
    missing = [rollout_id for rollout_id in rollout_ids if rollout_id not in found]
    if missing:
        raise DatabaseError(
            f"expected rollouts {missing[:3]!r} of training {training_id} in the database, got no such rows; use the "
            "database that the run began with, with the rollouts that it recorded"
        )
    ordered = (found[rollout_id] for rollout_id in rollout_ids)
    return [rollout for rollout, row in ordered if row.pruned_at is None]


async def load_advantages(
    session: AsyncSession, training_id: int, step: int
) -> list[tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]]:
    """The advantages of rollouts and of their turns, as `events.GroupEnded` has them, by group of `load_groups`."""
    group_rows = await _load_group_rows(session, training_id, step, "step")
    query = (
        select(RolloutRow.group_pk, RolloutRow.advantage, RolloutRow.turn_advantages)
        .where(RolloutRow.group_pk.in_([row.id for row in group_rows]), RolloutRow.status == "completed")
        .order_by(RolloutRow.position)
    )
    by_group: dict[int, list[tuple[float, tuple[float, ...]]]] = defaultdict(list)
    for group_pk, advantage, of_turns in await session.execute(query):
        if advantage is None:
            raise DatabaseError(f"expected an advantage for every rollout of step {step}, got NULL in group {group_pk}")
        by_group[group_pk].append((advantage, tuple(of_turns or ())))
    for replay in await _load_replays(session, [row.id for row in group_rows]):
        by_group[replay.group_pk].append((replay.advantage, tuple(replay.turn_advantages or ())))
    scored = (by_group[row.id] for row in group_rows)
    return [(tuple(advantage for advantage, _ in group), tuple(of_turns for _, of_turns in group)) for group in scored]


async def _load_group_rows(session: AsyncSession, training_id: int, step: int, phase: Phase) -> Sequence[Group]:
    """Ended groups of a step or evaluation; a step must exist, a group that still runs is left out."""
    if phase == "step":
        source = select(Step.id).where(Step.training_id == training_id, Step.step == step)
    else:
        source = select(Eval.id).where(Eval.training_id == training_id, Eval.step == step, Eval.phase == phase)
    source_id = await session.scalar(source)
    if source_id is None:
        raise DatabaseError(f"expected {phase} {step} of training {training_id} in the database, got no row")
    mine: ColumnElement[bool] = Group.step_id == source_id if phase == "step" else Group.eval_id == source_id
    query = select(Group).where(mine, Group.status == "completed").order_by(Group.group_index, Group.id)
    return (await session.scalars(query)).all()


async def _load_replays(session: AsyncSession, group_pks: Sequence[int]) -> Sequence[Replay]:
    query = select(Replay).where(Replay.group_pk.in_(group_pks)).order_by(Replay.group_pk, Replay.position)
    return (await session.scalars(query)).all()


async def _load_rollouts(session: AsyncSession, query: Select[RolloutRow]) -> list[tuple[Rollout, RolloutRow]]:
    """Ended rollouts among those that `query` selects; cancelled ones never became part of a group."""
    rows = (await session.scalars(query.where(RolloutRow.status.in_(("completed", "failed"))))).all()
    keys = [row.id for row in rows]
    validations = {
        row.rollout_pk: Validation(
            query=row.query, expected=row.expected, actual=row.actual, success=row.success, duration_s=row.duration_s
        )
        for row in await session.scalars(select(ValidationRow).where(ValidationRow.rollout_pk.in_(keys)))
    }
    judgements = {
        row.rollout_pk: Judgement(
            model=row.model,
            prompt=prompt,
            prompt_sha256=row.prompt_sha256,
            screenshots=row.screenshots,
            votes=tuple(JudgeVote(**vote) for vote in row.votes),
            decides=row.decides,
            duration_s=row.duration_s,
            cost_usd=row.cost_usd,
        )
        for row, prompt in await session.execute(
            select(JudgementRow, JudgePrompt.text)
            .join(JudgePrompt, JudgementRow.prompt_sha256 == JudgePrompt.sha256)
            .where(JudgementRow.rollout_pk.in_(keys))
        )
    }
    turns = await _load_turns(session, keys)
    return [(_build_rollout(row, turns[row.id], validations.get(row.id), judgements.get(row.id)), row) for row in rows]


async def _load_turns(session: AsyncSession, rollout_pks: Sequence[int]) -> Mapping[int, list[Turn]]:
    query = select(TurnRow).where(TurnRow.rollout_pk.in_(rollout_pks)).order_by(TurnRow.turn_index)
    rows = (await session.scalars(query)).all()
    wanted = {str(chunk["image"]) for row in rows for chunk in row.prompt_chunks if "image" in chunk}
    wanted |= {sha for row in rows for sha in (row.before_sha256, row.after_sha256) if sha is not None}
    images = await load_images(session, wanted)
    for digest in wanted - images.keys():  # pruned, and shown in prompts alone
        images[digest] = named_image(EncodedImage(data=b"", format="png", width_px=0, height_px=0), digest)
    by_rollout: dict[int, list[Turn]] = defaultdict(list)
    for row in rows:
        agent = AgentTurn(
            response_id=row.response_id,
            before=None if row.before_sha256 is None else images[row.before_sha256],
            action=None if row.action is None else decode_action(row.action),
            action_error=row.action_error,
            after=None if row.after_sha256 is None else images[row.after_sha256],
            durations_s=row.durations_s,
            more_actions=decode_more_actions(row.action),
            target_box=tuple(row.target_box or ()),
        )
        failure = None
        if row.failure_kind is not None and row.failure_message is not None:
            failure = ParseFailure(kind=row.failure_kind, message=row.failure_message)  # pyright: ignore[reportArgumentType]
        turn = Turn(
            index=row.turn_index,
            model=ModelTurn(
                response_id=row.response_id,
                prompt=decode_prompt(row.prompt_token_ids, row.prompt_chunks, images),
                sampled_tokens=tuple(row.sampled_tokens),
                sampling_logprobs=tuple(row.sampling_logprobs),
                policy_version=row.policy_version,
                stop=row.stop,
                text=row.text,
                failure=failure,
                prompt_matches_renderer=row.prompt_matches_renderer,
                request=row.request,
                started_at=row.started_unix_s,
                duration_s=row.duration_s,
                cached_tokens=row.cached_tokens,
                grammar=row.grammar or "",
            ),
            agent=agent,
            state=row.state or "",
        )
        by_rollout[row.rollout_pk].append(turn)
    return by_rollout


def _build_rollout(
    row: RolloutRow, turns: Sequence[Turn], validation: Validation | None, judgement: Judgement | None
) -> Rollout:
    if row.started_unix_s is None or row.duration_s is None or row.stop_reason is None:
        raise DatabaseError(f"expected an ended rollout {row.rollout_id!r}, got one without its end")
    parts = {name: float(value) for name, value in (row.reward_parts or {}).items()}
    return Rollout(
        rollout_id=row.rollout_id,
        task_id=row.task_id,
        seed=row.seed,
        group_index=row.group_index,
        member_index=row.member_index,
        device_id=row.device_id,
        worker=row.worker,
        parent_id=row.parent_id,
        fork_turn=row.fork_turn,
        turns=tuple(turns),
        stop_reason=StopReason(row.stop_reason),
        answer=row.answer,
        validation=validation,
        reward=None
        if row.reward is None
        else Reward(total=row.reward, parts=parts, of_turns=tuple(row.turn_rewards or ())),
        error=row.error,
        started_at=row.started_unix_s,
        duration_s=row.duration_s,
        judgement=judgement,
        max_turns=row.max_turns,
    )
