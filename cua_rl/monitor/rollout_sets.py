"""Sets of rollouts: the filter that an address names, as conditions on rows, and the runs that it speaks of."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query
from sqlalchemy import ColumnElement, Text, and_, case, func, literal_column, or_, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from cua_rl.database.columns import AnyText
from cua_rl.database.judge_models import JudgementRow
from cua_rl.database.models import Eval, Group, RolloutRow, Step, TaskRow, Training, TurnRow, ValidationRow
from cua_rl.database.monitor_models import NoteRow, RolloutOverride
from cua_rl.monitor.databases import AnySelect, Database, Databases, RunAccess
from cua_rl.monitor.schemas import Phase, RunStatus
from cua_rl.types.rollout import StopReason

Verdict = Literal["success", "failure", "fault", "open"]
_Name = Annotated[str | None, Query(max_length=300)]
_Count = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
_PUNCTUATION = r"[\s!-/:-@\[-`{-~]+"  # of ASCII: what letters are differs between databases
# a UUID, a hexadecimal id of six or more digits with a decimal one among them or of eight letters, a number
_HEX = "[0-9a-fA-F]"
_VARYING = (
    rf"'(?<![0-9A-Za-z])({_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
    rf"|0x{_HEX}+|(?=[a-fA-F]*[0-9]){_HEX}{{6,}}|[a-f]{{8,}})(?![0-9A-Za-z])|[0-9]+'"
)
# constants are literals, as a query that groups by a parameter is refused
FAULT_MESSAGE: ColumnElement[str] = func.left(
    func.regexp_replace(
        func.left(RolloutRow.error, literal_column("1000")),
        literal_column(_VARYING),
        literal_column("'#'"),
        literal_column("'g'"),
    ),
    literal_column("300"),
    type_=AnyText(),
)
"""A fault's message; ids, addresses and times do not tell it from others."""


def _verdicts(rollout: Any) -> dict[Verdict, ColumnElement[bool]]:
    """When a rollout has which verdict, in terms that Postgres has statistics for."""
    completed = rollout.status == literal_column("'completed'")
    return {
        "fault": rollout.status == literal_column("'failed'"),
        "success": and_(completed, rollout.success.is_(True)),
        "failure": and_(completed, rollout.success.is_not(True)),
        "open": rollout.status.not_in((literal_column("'completed'"), literal_column("'failed'"))),
    }


def verdict_of(rollout: Any) -> ColumnElement[str]:
    """As it was recorded; a fault says nothing about the policy. `rollout` has the columns of `rollouts`."""
    return case(
        *((condition, literal_column(f"'{verdict}'", Text())) for verdict, condition in _verdicts(rollout).items())
    )


def cause_of(rollout: Any) -> ColumnElement[str]:
    """Why a rollout failed: its stop reason, or `wrong_final_state` if it finished and the validator disagreed."""
    is_wrong = and_(rollout.stop_reason == literal_column("'finished'"), rollout.success.is_not(None))
    stop_reason = func.coalesce(rollout.stop_reason, literal_column("'cancelled'"))
    return type_coerce(case((is_wrong, literal_column("'wrong_final_state'", Text)), else_=stop_reason), AnyText())


VERDICT, CAUSE = verdict_of(RolloutRow), cause_of(RolloutRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts belong to a set, as query parameters of the API and of the web app; None means all."""

    phase: Annotated[list[Phase] | None, Query(max_length=3, description="repeat it for several")] = None
    step: _Count = None
    min_step: _Count = None
    max_step: _Count = None
    task_id: _Name = None
    group_id: _Name = None
    category: _Name = None
    difficulty: _Name = None
    seed: Annotated[int | None, Query(ge=1 - 2**63, le=2**63 - 1)] = None
    status: RunStatus | None = None
    verdict: Annotated[Verdict | None, Query(description="as recorded; a fault is no failure of the policy")] = None
    stop_reason: StopReason | None = None
    cause: Annotated[str | None, Query(max_length=100, description="wrong_final_state, or a stop reason")] = None
    fault: Annotated[str | None, Query(max_length=300, description="its message, with # for ids and numbers")] = None
    failure_kind: Annotated[str | None, Query(max_length=100, description="of a turn that could not be read")] = None
    check: Annotated[str | None, Query(max_length=10_000, description="what the validator looked at")] = None
    expected: Annotated[str | None, Query(max_length=10_000, description="by the validator")] = None
    actual: Annotated[str | None, Query(max_length=10_000, description="that the validator read")] = None
    device_id: _Name = None
    worker: _Name = None
    branch: Annotated[bool | None, Query(description="whether it went on from a turn of another rollout")] = None
    judge: Annotated[
        Literal["agrees", "disagrees"] | None, Query(description="a judge beside the validator, with what was recorded")
    ] = None
    review: Annotated[
        Literal["none", "confirmed", "overturned"] | None,
        Query(description="no verdict of a person, the recorded one, or another one"),
    ] = None
    tag: Annotated[str | None, Query(max_length=300, description="that a person gave it or one of its turns")] = None
    note: Annotated[str | None, Query(max_length=300, description="a part of what a person wrote about it")] = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_turns: _Count = None
    max_turns: _Count = None
    min_gap: Annotated[float | None, Query(description="largest |trainer - sampler| log-probability")] = None
    max_gap: float | None = None
    stragglers: Annotated[
        bool | None, Query(description="slower than 95 % of their step or evaluation, or the last of it to end")
    ] = None
    search: Annotated[
        str,
        Query(max_length=200, description="words of instruction, answer, task or category, or the start of an id"),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOfDatabase:
    """Runs that one database holds, and an open session to it."""

    database: Database
    session: AsyncSession
    training_ids: tuple[int, ...]


def runs_of(run: RunAccess) -> RunsOfDatabase:
    """One run, as a set has them."""
    return RunsOfDatabase(database=run.database, session=run.session, training_ids=(run.training.id,))


@asynccontextmanager
async def open_runs(
    databases: Databases, run_ids: Sequence[str]
) -> AsyncGenerator[tuple[list[RunsOfDatabase], list[tuple[str, Training]]]]:
    """Runs by database, and each with its id; raises `NotFoundError`. One session a database, however many runs."""
    found: dict[str, tuple[Database, dict[int, Training]]] = {}
    for run_id in dict.fromkeys(run_ids):
        async with databases.open_run(run_id) as run:
            found.setdefault(run.database.key, (run.database, {}))[1][run.training.id] = run.training
    sessions = [database.sessions() for database, _ in found.values()]
    try:
        opened = [
            RunsOfDatabase(database=database, session=session, training_ids=tuple(trainings))
            for session, (database, trainings) in zip(sessions, found.values(), strict=True)
        ]
        named = [(one.run_id(key), run) for one, trainings in found.values() for key, run in trainings.items()]
        yield opened, named
    finally:
        for session in sessions:
            await session.close()


def conditions(runs: RunsOfDatabase, wanted: RolloutFilter) -> list[ColumnElement[bool]]:
    """What rows of `rollouts` fulfil that belong to the set."""
    equal: dict[Any, Any] = {
        RolloutRow.task_id: wanted.task_id,
        RolloutRow.seed: wanted.seed,
        RolloutRow.status: wanted.status,
        RolloutRow.stop_reason: wanted.stop_reason,
        RolloutRow.device_id: wanted.device_id,
        RolloutRow.worker: wanted.worker,
        RolloutRow.parent_id.is_not(None): wanted.branch,
        CAUSE: wanted.cause,
        FAULT_MESSAGE: wanted.fault,
    }
    found = [RolloutRow.training_id.in_(runs.training_ids)]
    found += _given(equal)
    found += [] if wanted.verdict is None else [_verdicts(RolloutRow)[wanted.verdict]]
    found += [] if wanted.cause is None or wanted.verdict == "failure" else [_verdicts(RolloutRow)["failure"]]
    found += _between(RolloutRow.reward, wanted.min_reward, wanted.max_reward)
    found += _between(RolloutRow.num_turns, wanted.min_turns, wanted.max_turns)
    found += _between(RolloutRow.max_gap, wanted.min_gap, wanted.max_gap)
    of_sources, of_group = _source_conditions(wanted), _given({Group.group_id: wanted.group_id})
    groups = select(Group.id).outerjoin(Step, Group.step_id == Step.id).outerjoin(Eval, Group.eval_id == Eval.id)
    groups = groups.where(Group.training_id.in_(runs.training_ids), *of_sources)
    if of_sources or of_group:
        found.append(RolloutRow.group_pk.in_(groups.where(*of_group)))
    kinds = _given({TaskRow.category: wanted.category, TaskRow.difficulty: wanted.difficulty})
    if kinds:
        found.append(RolloutRow.task_pk.in_(select(TaskRow.id).where(*kinds)))
    if wanted.fault is not None:
        found.append(RolloutRow.error.is_not(None))  # of which there is an index
    found += _second_opinions(runs, wanted)
    if wanted.failure_kind is not None:
        of = aliased(RolloutRow)
        unread = select(TurnRow.rollout_pk).join(of, is_own_turn(of)).where(TurnRow.failure_kind == wanted.failure_kind)
        found.append(RolloutRow.id.in_(unread))
    if wanted.stragglers is not None:
        found.append(RolloutRow.id.in_(_stragglers(groups if of_sources else None, runs)) == wanted.stragglers)
    row = ValidationRow
    if checks := _given({row.query: wanted.check, row.expected: wanted.expected, row.actual: wanted.actual}):
        found.append(RolloutRow.id.in_(select(ValidationRow.rollout_pk).where(*checks)))
    return found + [_has_word(runs, word) for word in wanted.search.split()]


def _stragglers(groups: AnySelect | None, runs: RunsOfDatabase) -> AnySelect:
    """Rollouts slower than 95 % of their step or evaluation, or the last of it to end; of these `groups` if given."""
    one, group = aliased(RolloutRow), aliased(Group)
    source = func.coalesce(group.step_id, -group.eval_id)
    ended = [*(row.training_id.in_(runs.training_ids) for row in (one, group)), one.duration_s.is_not(None)]
    ended += [] if groups is None else [one.group_pk.in_(groups)]
    long_s = func.percentile_cont(0.95).within_group(one.duration_s)
    ends = select(source.label("source"), long_s.label("long_s"), func.max(one.ended_at).label("last"))
    of_source = ends.join_from(one, group, one.group_pk == group.id).where(*ended).group_by(source).subquery()
    return (
        select(one.id)
        .join_from(one, group, one.group_pk == group.id)
        .join(of_source, of_source.c.source == source)
        .where(*ended, or_(one.duration_s > of_source.c.long_s, one.ended_at == of_source.c.last))
    )


def _given(values: dict[Any, Any]) -> list[ColumnElement[bool]]:
    return [column == value for column, value in values.items() if value is not None]


def _between(column: Any, least: float | None, most: float | None) -> list[ColumnElement[bool]]:
    ends = ((least, column.__ge__), (most, column.__le__))
    return [compare(end) for end, compare in ends if end is not None]


def is_own_turn(rollout: Any) -> ColumnElement[bool]:
    """True for turns of a rollout but those that it shares with its parent, which count there."""
    return and_(TurnRow.rollout_pk == rollout.id, TurnRow.turn_index >= rollout.fork_turn)


def is_newest_verdict() -> ColumnElement[bool]:
    """True for the verdict of a person that counts, unless it withdraws the earlier ones."""
    newest = select(func.max(RolloutOverride.id)).group_by(RolloutOverride.rollout_pk)
    return and_(RolloutOverride.id.in_(newest), RolloutOverride.success.is_not(None))


def _second_opinions(runs: RunsOfDatabase, wanted: RolloutFilter) -> list[ColumnElement[bool]]:
    """What a judge or people made of the rollout."""
    found: list[ColumnElement[bool]] = []
    of_runs = RolloutRow.training_id.in_(runs.training_ids)
    if wanted.judge is not None:
        judged = select(JudgementRow.rollout_pk).join(RolloutRow, JudgementRow.rollout_pk == RolloutRow.id)
        agrees = JudgementRow.success == RolloutRow.success
        wanted_one = agrees if wanted.judge == "agrees" else ~agrees
        found.append(RolloutRow.id.in_(judged.where(of_runs, ~JudgementRow.decides, wanted_one)))
    noted = select(NoteRow.rollout_pk).where(
        NoteRow.training_id.in_(runs.training_ids), NoteRow.rollout_pk.is_not(None)
    )
    if wanted.tag is not None:
        found.append(RolloutRow.id.in_(noted.where(NoteRow.tag == wanted.tag)))
    if wanted.note is not None:
        found.append(RolloutRow.id.in_(noted.where(NoteRow.text.icontains(wanted.note, autoescape=True))))
    reviewed = select(RolloutOverride.rollout_pk).join(RolloutRow, RolloutOverride.rollout_pk == RolloutRow.id)
    reviewed = reviewed.where(of_runs, is_newest_verdict())
    is_same = case((RolloutOverride.success.is_(True), "success"), else_="failure") == VERDICT
    if wanted.review == "none":
        found.append(RolloutRow.id.not_in(reviewed))
    elif wanted.review is not None:
        found.append(RolloutRow.id.in_(reviewed.where(is_same if wanted.review == "confirmed" else ~is_same)))
    return found


def _source_conditions(wanted: RolloutFilter) -> list[ColumnElement[bool]]:
    """On a group joined with its step or evaluation, which hold for all groups of these alike."""
    number = func.coalesce(Step.step, Eval.step)
    found = _between(number, wanted.min_step, wanted.max_step)
    found += _given({number: wanted.step})
    if wanted.phase:
        of_steps = Group.step_id.is_not(None)
        found.append(
            or_(of_steps, Eval.phase.in_(wanted.phase)) if "step" in wanted.phase else Eval.phase.in_(wanted.phase)
        )
    return found


def _has_word(runs: RunsOfDatabase, word: str) -> ColumnElement[bool]:
    """Whether a word is in a text of the rollout, in any spelling: wi-fi finds Wifi. Ids are found by their start."""
    letters = re.sub(_PUNCTUATION, "", word)
    has_id = RolloutRow.rollout_id.startswith(word, autoescape=True)
    if not letters:
        return has_id

    def holds(column: Any) -> ColumnElement[bool]:
        plain = func.regexp_replace(column, _PUNCTUATION, "", "g", type_=AnyText())
        return plain.icontains(letters, autoescape=True)

    # a run has few tasks beside its rollouts, and other runs of the database have theirs
    theirs = select(Group.task_pk).where(Group.training_id.in_(runs.training_ids))
    of_task = or_(holds(TaskRow.task_id), holds(TaskRow.instruction), holds(TaskRow.category))
    tasks = select(TaskRow.id).where(TaskRow.id.in_(theirs), of_task)
    nameless = and_(RolloutRow.task_pk.is_(None), holds(RolloutRow.task_id))
    return or_(RolloutRow.task_pk.in_(tasks), has_id, nameless, holds(RolloutRow.answer))  # the cheapest first
