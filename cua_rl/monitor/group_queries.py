"""Queries about steps, evaluations and groups: grids of rollouts, and one group on a common time axis."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Eval, Group, Replay, RolloutRow, Step, TaskRow, TurnRow
from cua_rl.database.monitor_models import RolloutOverride
from cua_rl.evaluation.statistics import sum_tasks
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import NotFoundError, RunAccess
from cua_rl.monitor.figures import columns, fault_bounds, finite, finite_values, make_rate, task_fields
from cua_rl.monitor.run_summaries import is_alive
from cua_rl.monitor.schemas import Phase
from cua_rl.types.json_values import mapping

Overrides = Mapping[int, tuple[bool | None, float | None]]


async def find_source(run: RunAccess, phase: Phase, step: int) -> Step | Eval:
    """The row of a step or evaluation; raises `NotFoundError`."""
    table = Step if phase == "step" else Eval
    query = select(table).where(table.training_id == run.training.id, table.step == step)
    if table is Eval:
        query = query.where(Eval.phase == phase)
    row = await run.session.scalar(query)
    if row is None:
        raise NotFoundError(f"expected a {phase} {step} in run {run.training.run_name!r}, got none; see its timeline")
    return row


async def load_source(run: RunAccess, phase: Phase, step: int) -> schemas.SourceDetail:
    """A step or an evaluation with its groups x rollouts grid."""
    row = await find_source(run, phase, step)
    mine = Group.step_id == row.id if isinstance(row, Step) else Group.eval_id == row.id
    groups = await load_groups(run.session, mine)
    previous, following = await _neighbours(run, row)
    ended = [group for group in groups if group.num_rollouts is not None]
    of_steps: dict[str, Any] = dict.fromkeys(("trained_policy_version", "num_datums", "datums_sha256"))
    of_steps["rollouts_ended_at"] = row.ended_at
    return schemas.SourceDetail(
        **of_steps | columns(row, phase=phase, metrics=finite_values(row.metrics)),
        run_id=run.run_id,
        run_name=run.training.run_name,
        alias=run.training.alias,
        is_run_alive=is_alive(run.training),
        success=make_rate(sum_tasks((group.num_successes or 0, group.num_rollouts or 0) for group in ended)),
        fault_bounds=fault_bounds(row.metrics),
        previous=previous,
        next=following,
        groups=groups,
    )


async def _neighbours(run: RunAccess, row: Step | Eval) -> tuple[schemas.SourceRef | None, schemas.SourceRef | None]:
    """The previous and next step, or the previous and next evaluation including the baseline."""
    if isinstance(row, Step):
        mine = Step.training_id == run.training.id
        before = await run.session.scalar(select(func.max(Step.step)).where(mine, Step.step < row.step))
        after = await run.session.scalar(select(func.min(Step.step)).where(mine, Step.step > row.step))
        previous, following = (
            None if step is None else schemas.SourceRef(phase="step", step=step) for step in (before, after)
        )
        return previous, following
    query = select(Eval.phase, Eval.step).where(Eval.training_id == run.training.id).order_by(Eval.step, Eval.phase)
    refs = [schemas.SourceRef(phase=phase, step=step) for phase, step in await run.session.execute(query)]
    place = refs.index(schemas.SourceRef(phase=row.phase, step=row.step))
    return refs[place - 1] if place else None, refs[place + 1] if place + 1 < len(refs) else None


async def load_groups(session: AsyncSession, condition: Any) -> list[schemas.GroupSummary]:
    """Groups with their rollouts, in order; five statements, however many groups."""
    query = select(Group, TaskRow).outerjoin(TaskRow, Group.task_pk == TaskRow.id).where(condition)
    found = (await session.execute(query.order_by(Group.group_index, Group.id))).all()
    keys = [group.id for group, _ in found]
    members = select(RolloutRow).where(RolloutRow.group_pk.in_(keys))
    rollouts: dict[int, list[RolloutRow]] = defaultdict(list)
    for row in await session.scalars(members.order_by(RolloutRow.member_index, RolloutRow.id)):
        rollouts[row.group_pk].append(row)
    overrides = await load_overrides(session, (row.id for rows in rollouts.values() for row in rows))
    joined = (
        select(Replay.group_pk, Replay.advantage, RolloutRow.rollout_id, RolloutRow.reward, Step.step)
        .join(RolloutRow, Replay.rollout_pk == RolloutRow.id)
        .join(Group, RolloutRow.group_pk == Group.id)
        .outerjoin(Step, Group.step_id == Step.id)
        .where(Replay.group_pk.in_(keys))
        .order_by(Replay.position)
    )
    replays: dict[int, list[schemas.Replay]] = defaultdict(list)
    for earlier in await session.execute(joined):
        replays[earlier.group_pk].append(schemas.Replay(**columns(earlier, advantage=finite(earlier.advantage) or 0.0)))
    return [
        _group_summary(group, task, rollouts.get(group.id, []), overrides, replays.get(group.id, []))
        for group, task in found
    ]


async def load_overrides(session: AsyncSession, rollout_pks: Iterable[int]) -> Overrides:
    """The newest human verdict on each of these rollouts."""
    query = (
        select(RolloutOverride.rollout_pk, RolloutOverride.success, RolloutOverride.reward)
        .where(RolloutOverride.rollout_pk.in_(list(rollout_pks)))
        .order_by(RolloutOverride.id)
    )
    return {row.rollout_pk: (row.success, row.reward) for row in await session.execute(query)}


def rollout_cell(row: RolloutRow, overrides: Overrides) -> dict[str, Any]:
    """The fields of a `RolloutCell`."""
    success, reward = overrides.get(row.id, (None, None))
    return columns(row, override_success=success, override_reward=finite(reward))


def _group_summary(
    group: Group,
    task: TaskRow | None,
    rollouts: Sequence[RolloutRow],
    overrides: Overrides,
    replays: list[schemas.Replay],
) -> schemas.GroupSummary:
    rewards = {row.reward for row in rollouts if row.reward is not None} | {replay.reward for replay in replays}
    return schemas.GroupSummary(
        **task_fields(task) | columns(group),
        is_constant=group.status == "completed" and len(rewards) <= 1,
        rollouts=[schemas.RolloutCell(**rollout_cell(row, overrides)) for row in rollouts],
        replays=replays,
    )


async def load_group(run: RunAccess, phase: Phase, step: int, group_id: str) -> schemas.GroupDetail:
    """One group with the turns of its rollouts on a common time axis."""
    source = await find_source(run, phase, step)
    mine = Group.step_id == source.id if isinstance(source, Step) else Group.eval_id == source.id
    groups = await load_groups(run.session, and_(mine, Group.group_id == group_id))
    if not groups:
        raise NotFoundError(f"expected a group {group_id!r} in {phase} {step}, got none; that {phase} lists its groups")
    (group,) = groups
    ids = [cell.rollout_id for cell in group.rollouts]
    began = min((cell.started_at for cell in group.rollouts), default=group.started_at).timestamp()
    turns = await _clock_turns(run, ids, began)
    rollouts = [
        schemas.ClockRollout(
            **cell.model_dump(), started_s=cell.started_at.timestamp() - began, turns=turns.get(cell.rollout_id, [])
        )
        for cell in group.rollouts
    ]
    ends = [rollout.started_s + (rollout.duration_s or 0.0) for rollout in rollouts]
    ends += [turn.started_s + turn.duration_s for rollout in rollouts for turn in rollout.turns]
    return schemas.GroupDetail(
        run_id=run.run_id,
        run_name=run.training.run_name,
        alias=run.training.alias,
        is_run_alive=is_alive(run.training),
        phase=phase,
        step=step,
        group=group,
        duration_s=max(ends, default=0.0),
        rollouts=rollouts,
    )


async def _clock_turns(run: RunAccess, rollout_ids: Sequence[str], began: float) -> dict[str, list[schemas.ClockTurn]]:
    """Turns on the time axis, by rollout id."""
    query = (
        select(
            RolloutRow.rollout_id,
            TurnRow.turn_index,
            TurnRow.started_unix_s,
            TurnRow.duration_s,
            TurnRow.durations_s,
            TurnRow.action,
            TurnRow.failure_kind,
            TurnRow.action_error,
            TurnRow.before_sha256,
            TurnRow.after_sha256,
        )
        .join(RolloutRow, TurnRow.rollout_pk == RolloutRow.id)
        .where(RolloutRow.training_id == run.training.id, RolloutRow.rollout_id.in_(rollout_ids))
        .order_by(TurnRow.turn_index)
    )
    found: dict[str, list[schemas.ClockTurn]] = defaultdict(list)
    for row in await run.session.execute(query):
        stages = [value for value in finite_values(row.durations_s).values() if value is not None]
        started_s = finite(row.started_unix_s - began) or 0.0
        duration_s = max(finite(row.duration_s) or 0.0, finite(sum(stages)) or 0.0)
        action = mapping(row.action) or None
        turn = schemas.ClockTurn(**columns(row, started_s=started_s, duration_s=duration_s, action=action))
        found[row.rollout_id].append(turn)
    return found
