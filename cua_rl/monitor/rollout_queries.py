"""Queries about rollouts: filtered lists, one rollout with its turns, human verdicts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from math import inf, nan
from operator import itemgetter
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import ColumnElement, Double, cast, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import defer

from cua_rl.database.judge_models import JudgementRow, JudgePrompt
from cua_rl.database.models import (
    Environment,
    Eval,
    Group,
    Replay,
    RolloutRow,
    Screenshot,
    StatusChange,
    Step,
    TaskRow,
    TurnRow,
    ValidationRow,
)
from cua_rl.database.monitor_models import NoteRow, RolloutOverride
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import AnySelect, Database, NotFoundError, RunAccess
from cua_rl.monitor.figures import columns, finite, finite_mean, finite_values, task_fields
from cua_rl.monitor.group_queries import load_overrides, rollout_cell
from cua_rl.monitor.pages import decode_places, encode_cursor
from cua_rl.monitor.rollout_sets import RolloutFilter, RunsOfDatabase, conditions, runs_of
from cua_rl.monitor.run_summaries import is_alive
from cua_rl.monitor.schemas import Page
from cua_rl.monitor.schemas import StatusChange as StatusChangeShown
from cua_rl.monitor.set_queries import PHASE, STEP
from cua_rl.renderers.answers import parse_answer
from cua_rl.types.json_values import mapping

_SORTED: dict[str, Any] = {
    "started": RolloutRow.id,
    "turns": RolloutRow.num_turns,
    "reward": RolloutRow.reward,
    "advantage": RolloutRow.advantage,
    "gap": RolloutRow.max_gap,
    "took": RolloutRow.duration_s,
    "tokens": RolloutRow.num_sampled_tokens,
}
"""What lists can be sorted by; rollouts without a value come last."""


Sort = Annotated[str, Query(pattern=f"^-?({'|'.join(_SORTED)})$", description="minus: largest first")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """A part of a list, as query parameters."""

    sort: Sort = "-started"
    cursor: Annotated[str | None, Query(max_length=2000, description="next_cursor of the page before")] = None
    limit: Annotated[int, Query(ge=1, le=200)] = 50


def _rollouts_of(*where: ColumnElement[bool]) -> AnySelect:
    return (
        select(RolloutRow, Group.group_id, PHASE, STEP)
        .join(Group, RolloutRow.group_pk == Group.id)
        .outerjoin(Step, Group.step_id == Step.id)
        .outerjoin(Eval, Group.eval_id == Eval.id)
        .where(*where)
    )


def sort_number(sort: str) -> Any:
    """What lists are sorted by, as a number; rollouts without a value come last."""
    column = _SORTED[sort.removeprefix("-")]
    return func.coalesce(func.nullif(cast(column, Double), nan), -inf if sort.startswith("-") else inf)


async def list_rollouts(
    runs: Sequence[RunsOfDatabase], wanted: RolloutFilter, paging: Paging
) -> Page[schemas.RolloutItem]:
    """Rollouts of a set; of several databases, those lists merged."""
    falls, column = paging.sort.startswith("-"), _SORTED[paging.sort.removeprefix("-")]
    by_time = column is RolloutRow.id  # which says nothing to another database
    key = column if by_time else sort_number(paging.sort)
    order = (key.desc(), RolloutRow.id.desc()) if falls else (key, RolloutRow.id)
    places: list[tuple[float, int] | None] = [None] * len(runs)
    if paging.cursor is not None:
        places = decode_places(paging.cursor, len(runs))
    lists: list[list[tuple[float, int, Any]]] = []
    for index, (one, place) in enumerate(zip(runs, places, strict=True)):
        query = _rollouts_of(*conditions(one, wanted)).add_columns(key.label("key"))
        if place is not None:
            at, after = (key, place[1]) if by_time else (tuple_(key, RolloutRow.id), tuple_(*map(literal, place)))
            query = query.where(at < after if falls else at > after)
        rows = (await one.session.execute(query.order_by(*order).limit(paging.limit + 1))).all()
        lists.append([(row[0].started_at.timestamp() if by_time else row.key, index, row) for row in rows])
    merged = list(merge(*lists, key=itemgetter(0), reverse=falls))
    shown = merged[: paging.limit]
    items: list[Iterator[schemas.RolloutItem]] = []
    for index, one in enumerate(runs):
        mine = [row for _, place, row in shown if place == index]
        items.append(iter(await rollout_items(one, mine)))
        places[index] = (mine[-1].key, mine[-1][0].id) if mine else places[index]
    return Page(
        items=[next(items[index]) for _, index, _ in shown],
        next_cursor=encode_cursor(*places) if len(merged) > paging.limit else None,
    )


async def rollout_items(runs: RunsOfDatabase, rows: Sequence[Any]) -> list[schemas.RolloutItem]:
    """Rows of `_rollouts_of` as items."""
    overrides = await load_overrides(runs.session, (row[0].id for row in rows))
    # the last screenshot of each rollout, and the action if its result is not known yet
    last = (
        select(TurnRow.rollout_pk, TurnRow.before_sha256, TurnRow.after_sha256, TurnRow.action)
        .where(TurnRow.rollout_pk.in_([row[0].id for row in rows]))
        .order_by(TurnRow.rollout_pk, TurnRow.turn_index.desc())
        .ext(distinct_on(TurnRow.rollout_pk))
    )
    screens: dict[int, dict[str, Any]] = {
        key: {"last_sha256": after or before, "last_action": None if after else mapping(action) or None}
        for key, before, after, action in await runs.session.execute(last)
    }
    tasks = select(TaskRow.id, TaskRow.instruction).where(TaskRow.id.in_([row[0].task_pk for row in rows]))
    instructions = {key: text for key, text in await runs.session.execute(tasks)}  # noqa: C416 - a row is no pair to pyright
    tagged: AnySelect = select(NoteRow.rollout_pk, NoteRow.tag).where(
        NoteRow.rollout_pk.in_([row[0].id for row in rows])
    )
    tags: dict[int, list[str]] = {}
    for key, tag in await runs.session.execute(tagged.where(NoteRow.tag.is_not(None)).order_by(NoteRow.id)):
        tags.setdefault(key, []).append(tag)
    return [
        schemas.RolloutItem(
            **_item(runs.database, overrides, *row[:4]),
            **screens.get(row[0].id, {}),
            instruction=instructions.get(row[0].task_pk),
            given_tags=list(dict.fromkeys(tags.get(row[0].id, []))),
        )
        for row in rows
    ]


async def failed_rollouts(run: RunAccess, task_id: str, limit: int) -> tuple[int, list[schemas.RolloutItem]]:
    """How many rollouts of a task have no success, and the latest; faults say nothing about the policy."""
    mine = conditions(runs_of(run), RolloutFilter(task_id=task_id, verdict="failure"))
    total = await run.session.scalar(select(func.count()).select_from(RolloutRow).where(*mine))
    query = _rollouts_of(*mine).order_by(RolloutRow.id.desc()).limit(limit)
    return total or 0, await rollout_items(runs_of(run), (await run.session.execute(query)).all())


def _item(database: Database, overrides: Any, row: RolloutRow, group_id: str, phase: str, step: int) -> dict[str, Any]:
    run_id = database.run_id(row.training_id)
    return rollout_cell(row, overrides) | {"run_id": run_id, "phase": phase, "step": step, "group_id": group_id}


async def find_rollout(run: RunAccess, rollout_id: str) -> RolloutRow:
    """The row of a rollout; raises `NotFoundError`."""
    query = select(RolloutRow).where(RolloutRow.training_id == run.training.id, RolloutRow.rollout_id == rollout_id)
    row = await run.session.scalar(query)
    if row is None:
        raise NotFoundError(
            f"expected the rollout_id of a rollout of {run.training.run_name!r}, got {rollout_id[:120]!r}; "
            "the run's steps list them"
        )
    return row


async def load_rollout(run: RunAccess, rollout_id: str) -> schemas.Rollout:
    session = run.session
    found = await find_rollout(run, rollout_id)
    row, group_id, phase, step = (await session.execute(_rollouts_of(RolloutRow.id == found.id))).one()
    verdicts = await list_overrides(run, row.id)  # read once: one that comes in meanwhile shows wholly or not at all
    overrides = {row.id: (verdicts[-1].success, verdicts[-1].reward)} if verdicts else {}
    task = None if row.task_pk is None else await session.get(TaskRow, row.task_pk)
    validation = await session.scalar(select(ValidationRow).where(ValidationRow.rollout_pk == row.id))
    device = await session.scalar(select(Environment).where(Environment.rollout_pk == row.id))
    changes = select(StatusChange).where(StatusChange.rollout_pk == row.id).order_by(StatusChange.id)
    siblings = select(RolloutRow).where(RolloutRow.group_pk == row.group_pk)
    members = (await session.scalars(siblings.order_by(RolloutRow.member_index, RolloutRow.id))).all()
    others = await load_overrides(session, (one.id for one in members if one.id != row.id))
    replays = (
        select(Step.step)
        .join(Group, Group.step_id == Step.id)
        .join(Replay, Replay.group_pk == Group.id)
        .where(Replay.rollout_pk == row.id)
        .order_by(Step.step)
    )
    parts: dict[str, Any] = {"reward_parts": None if row.reward_parts is None else finite_values(row.reward_parts)}
    return schemas.Rollout(
        **task_fields(task) | _item(run.database, overrides, row, group_id, phase, step) | parts,
        run_name=run.training.run_name,
        alias=run.training.alias,
        is_run_alive=is_alive(run.training),
        validation=None if validation is None else schemas.ValidationShown.model_validate(validation),
        judgement=await _judgement(run, row.id),
        device=None if device is None else schemas.DeviceShown.model_validate(device),
        overrides=verdicts,
        history=[StatusChangeShown.model_validate(change) for change in await session.scalars(changes)],
        replayed_at_steps=list(await run.session.scalars(replays)),
        siblings=[schemas.RolloutCell(**rollout_cell(one, {**others, **overrides})) for one in members],
        turns=await _load_turns(run, row, phase),
    )


async def _judgement(run: RunAccess, rollout_pk: int) -> schemas.JudgementShown | None:
    query = select(JudgementRow, JudgePrompt.text).join(JudgePrompt, JudgementRow.prompt_sha256 == JudgePrompt.sha256)
    found = (await run.session.execute(query.where(JudgementRow.rollout_pk == rollout_pk))).one_or_none()
    if found is None:
        return None
    row, prompt = found
    return schemas.JudgementShown(**columns(row), prompt=prompt)


async def list_overrides(run: RunAccess, rollout_pk: int) -> list[schemas.Override]:
    """All verdicts on a rollout, oldest first."""
    query = select(RolloutOverride).where(RolloutOverride.rollout_pk == rollout_pk).order_by(RolloutOverride.id)
    return [schemas.Override(**columns(row), override_id=row.id) for row in await run.session.scalars(query)]


async def list_verdicts(run: RunAccess) -> list[schemas.Verdict]:
    """All verdicts of people on rollouts of a run, newest first."""
    query: AnySelect = (
        select(RolloutOverride, RolloutRow, PHASE, STEP)
        .join(RolloutRow, RolloutOverride.rollout_pk == RolloutRow.id)
        .join(Group, RolloutRow.group_pk == Group.id)
        .outerjoin(Step, Group.step_id == Step.id)
        .outerjoin(Eval, Group.eval_id == Eval.id)
        .where(RolloutRow.training_id == run.training.id)
        .order_by(RolloutOverride.id.desc())
    )
    return [
        schemas.Verdict(
            **columns(row) | columns(verdict),
            override_id=verdict.id,
            phase=phase,
            step=step,
            validator_success=row.success,
            trained_reward=finite(row.reward),
        )
        for verdict, row, phase, step in await run.session.execute(query)
    ]


async def _load_turns(run: RunAccess, rollout: RolloutRow, phase: str) -> list[schemas.TurnDetail]:
    num_prompt_tokens = func.cardinality(TurnRow.prompt_token_ids)
    query = (
        select(TurnRow, num_prompt_tokens)
        .where(TurnRow.rollout_pk == rollout.id)
        .order_by(TurnRow.turn_index)
        .options(defer(TurnRow.prompt_token_ids), defer(TurnRow.prompt_chunks), defer(TurnRow.sampled_tokens))
    )
    rows = (await run.session.execute(query)).all()
    seen = select(Screenshot.sha256, Screenshot.width_px, Screenshot.height_px)
    found = await run.session.execute(
        seen.where(
            Screenshot.sha256.in_({sha for row, _ in rows for sha in (row.before_sha256, row.after_sha256) if sha})
        )
    )
    shots = {row.sha256: schemas.ScreenshotRef.model_validate(row) for row in found}
    began = rollout.started_unix_s or rollout.started_at.timestamp()
    step = None
    if phase == "step" and any(row.training_logprobs is not None for row, _ in rows):
        step = await run.session.scalar(
            select(Step.step).join(Group, Group.step_id == Step.id).where(Group.id == rollout.group_pk)
        )
    return [turn_detail(row, count, shots, began, step) for row, count in rows]


def turn_detail(
    row: TurnRow, num_prompt_tokens: int, shots: Mapping[str, schemas.ScreenshotRef], began: float, step: int | None
) -> schemas.TurnDetail:
    """A turn as the API returns it; `began` is the rollout's start in Unix time."""
    parsed = parse_answer(row.text)
    sampled, trained = row.sampling_logprobs, row.training_logprobs
    gaps = [abs(a - b) for a, b in zip(trained or (), sampled, strict=bool(trained))]
    shown = columns(row, action=mapping(row.action) or None, request=mapping(row.request))
    shown |= {"duration_s": finite(row.duration_s) or 0.0, "durations_s": finite_values(row.durations_s)}
    return schemas.TurnDetail(
        **shown,
        trained_at_step=None if trained is None else step,
        thinking=parsed.reasoning,
        answer=parsed.text,
        tool_calls=[schemas.ToolCallShown(name=call.name, arguments=call.arguments) for call in parsed.tool_calls],
        before=shots.get(row.before_sha256 or ""),
        after=shots.get(row.after_sha256 or ""),
        num_prompt_tokens=num_prompt_tokens,
        num_sampled_tokens=len(sampled),
        logprob_mean=finite_mean(sampled),
        gap_mean_abs=finite_mean(gaps),
        started_s=finite(row.started_unix_s - began) or 0.0,
    )
