"""Counts the rollouts of a set by verdict, cause, task, check and step."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Text,
    and_,
    any_,
    cast,
    func,
    literal,
    literal_column,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import join, outerjoin

from cua_rl.database.judge_models import JudgementRow
from cua_rl.database.models import Eval, Group, RolloutRow, Step, TaskRow, Training, TurnRow, ValidationRow
from cua_rl.database.monitor_models import NoteRow, RolloutOverride
from cua_rl.evaluation.statistics import sum_tasks
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import AnySelect
from cua_rl.monitor.figures import columns, make_task_rate
from cua_rl.monitor.rollout_schemas import CheckCount, Count
from cua_rl.monitor.rollout_sets import (
    FAULT_MESSAGE,
    VERDICT,
    RolloutFilter,
    RunsOfDatabase,
    cause_of,
    conditions,
    is_newest_verdict,
    is_own_turn,
    verdict_of,
)
from cua_rl.monitor.schemas import Rate

PHASE = func.coalesce(Eval.phase, literal_column("'step'"))
STEP = func.coalesce(Step.step, Eval.step)
_FEW = 10_000  # ids that are given to each query of a set
_MOST = 200  # rows of each list, the most frequent ones
_ALL = true()
_Counts = Counter[tuple[Any, ...]]
FoundRollouts = list[tuple[RunsOfDatabase, Sequence[ColumnElement[bool]]]]
Tally = dict[str, dict[int, tuple[int, int]]]
"""Successes and rollouts with a verdict, by task and seed."""

_CHECKS = join(RolloutRow, ValidationRow, ValidationRow.rollout_pk == RolloutRow.id)
_UNREAD = join(RolloutRow, TurnRow, and_(is_own_turn(RolloutRow), TurnRow.failure_kind.is_not(None)))
_JUDGED = join(RolloutRow, JudgementRow, JudgementRow.rollout_pk == RolloutRow.id)
_IS_JUDGED = and_(~JudgementRow.decides, JudgementRow.success.is_not(None), RolloutRow.success.is_not(None))
_REVIEWED = join(RolloutRow, RolloutOverride, RolloutOverride.rollout_pk == RolloutRow.id)
_TAGS = select(NoteRow.rollout_pk, NoteRow.tag).where(NoteRow.tag.is_not(None)).distinct().subquery()


async def summarise_set(
    runs: Sequence[RunsOfDatabase], named: Iterable[tuple[str, Training]], wanted: RolloutFilter
) -> schemas.SetSummary:
    """The figures of a set."""
    found = await find_rollouts(runs, wanted)
    of_check = (ValidationRow.query, ValidationRow.expected, ValidationRow.actual, RolloutRow.success.is_(True))
    with_checks, with_turns = await _near(found, ValidationRow.rollout_pk, TurnRow.rollout_pk)
    (rows, steps), checks, unread, (messages, tagged, judged, reviewed) = await asyncio.gather(
        _count_rollouts(found),
        count(with_checks, _CHECKS, *of_check),
        count(with_turns, _UNREAD, TurnRow.failure_kind),
        _count_few(found),
    )
    faults = _sum((message, num) for (message,), num in messages.items())
    failures = _sum((cause, num) for (_, verdict, _, cause, *_), num in rows.items() if verdict == "failure")
    recorded = [((task, seed), verdict, num) for (_, verdict, _, _, task, seed), num in rows.items()]
    tally = tally_of(recorded)
    tasks = _tasks(tally, _sum((task, num) for (*_, task, _), num in rows.items()))
    return schemas.SetSummary(
        runs=[schemas.SetRun(**columns(run, run_id=run_id)) for run_id, run in named],
        num_rollouts=rows.total(),
        success=rate_of(tally),
        success_as_reviewed=rate_of(tally_of([*recorded, *_moves(reviewed)])),
        reviews=_opinions(reviewed),
        judgements=_opinions(judged),
        verdicts=_listed(_sum((verdict, num) for (_, verdict, *_), num in rows.items())),
        stops=_listed(_sum((stop, num) for (_, _, stop, *_), num in rows.items() if stop)),
        causes=_listed(failures),
        tags=_listed(_sum((tag, num) for (tag,), num in tagged.items())),
        categories=_listed(_sum((category, num) for (category, *_), num in rows.items() if category)),
        faults=_listed(faults),
        num_faults=len(faults),
        turn_failures=_listed(_sum((kind, num) for (kind,), num in unread.items())),
        tasks=tasks[:_MOST],
        num_tasks=len(tasks),
        checks=[
            CheckCount(query=query, expected=expected, actual=actual, success=success, count=num)
            for (query, expected, actual, success), num in checks.most_common(_MOST)
        ],
        num_checks=len(checks),
        steps=_steps(steps),
    )


async def find_rollouts(runs: Iterable[RunsOfDatabase], wanted: RolloutFilter) -> FoundRollouts:
    """What tells the set's rollouts from others: their ids if looking for them takes long and they are few."""
    found: FoundRollouts = []
    for one in runs:
        are_wanted = conditions(one, wanted)
        if wanted.search or wanted.stragglers:
            few = select(RolloutRow.id).where(*are_wanted).limit(_FEW).subquery()
            # as one text, which goes back to Postgres with each query: thousands of numbers take longer
            query = select(func.count(), func.coalesce(cast(func.array_agg(few.c.id), Text), "{}")).select_from(few)
            async with one.database.sessions() as session:
                num, ids = (await session.execute(query)).one()
            if num < _FEW:
                are_wanted = [RolloutRow.id == any_(cast(literal(ids, Text), ARRAY(BigInteger)))]
        found.append((one, are_wanted))
    return found


async def _near(found: FoundRollouts, *keys: Any) -> list[FoundRollouts]:
    """Only rows whose key is between the runs' first and last rollout, or Postgres reads those of all other runs."""
    near: list[FoundRollouts] = [[] for _ in keys]
    for one, are_wanted in found:
        ends = select(func.min(RolloutRow.id), func.max(RolloutRow.id))
        async with one.database.sessions() as session:
            first, last = (await session.execute(ends.where(RolloutRow.training_id.in_(one.training_ids)))).one()
        for rows, key in zip(near, keys, strict=True):
            rows.append((one, (*are_wanted, key.between(first, last))))
    return near


async def count(found: FoundRollouts, rows: Any, *keys: Any, only: ColumnElement[bool] = _ALL) -> _Counts:
    """How often these values occur among the rollouts of the set, or among what `rows` joins them with."""
    return await _add(
        (one, select(*keys, func.count()).select_from(rows).where(*are_wanted, only).group_by(*keys))
        for one, are_wanted in found
    )


async def _add(queries: Iterable[tuple[RunsOfDatabase, AnySelect]]) -> _Counts:
    """Sums of the last column by the others; each query has a connection of its own, as several run side by side."""
    sums = _Counts()
    for one, query in queries:
        async with one.database.sessions() as session:
            for row in await session.execute(query):
                sums[tuple(row[:-1])] += row[-1]
    return sums


async def _count_rollouts(found: FoundRollouts) -> tuple[_Counts, _Counts]:
    """By category, verdict, stop reason, cause, task and seed; and by phase, step, verdict and cause.

    Postgres counts by group first, by columns that one index has, and reads each rollout once for both.
    """
    queries: list[tuple[RunsOfDatabase, AnySelect]] = []
    for one, are_wanted in found:
        decisive = (RolloutRow.status, RolloutRow.success, RolloutRow.stop_reason)
        columns = (RolloutRow.group_pk, *decisive)
        by_group = select(*columns, func.count().label("num")).where(*are_wanted).group_by(*columns).subquery()
        ends = (by_group.c.status, by_group.c.success, by_group.c.stop_reason)
        by_task, by_step = (Group.task_pk, Group.task_id, Group.seed), (Group.step_id, Group.eval_id)
        sets = func.grouping_sets(tuple_(*by_task, *ends), tuple_(*by_step, *ends))
        num, is_step = func.sum(by_group.c.num, type_=BigInteger()).label("num"), func.grouping(Group.task_id)
        counted = select(*by_task, *by_step, *ends, num, is_step.label("is_step")).group_by(sets)
        is_own = and_(by_group.c.group_pk == Group.id, Group.training_id.in_(one.training_ids))
        of = counted.join_from(by_group, Group, is_own).subquery().c
        by = (TaskRow.category, of.task_id, of.seed, PHASE, STEP)
        query = select(of.is_step, *by, verdict_of(of), of.stop_reason, cause_of(of), of.num)
        sources = outerjoin(of.num.table, TaskRow, of.task_pk == TaskRow.id).outerjoin(Step, of.step_id == Step.id)
        queries.append((one, query.select_from(sources.outerjoin(Eval, of.eval_id == Eval.id))))
    rows, steps = _Counts(), _Counts()
    for (is_step, category, task, seed, phase, step, verdict, stop, cause), num in (await _add(queries)).items():
        if is_step:
            steps[phase, step, verdict, cause] += num
        else:
            rows[category, verdict, stop, cause, task, seed] += num
    return rows, steps


async def _count_few(found: FoundRollouts) -> list[_Counts]:
    """What few rollouts have: faults by message, tags, opinions of judges and people."""
    given = (VERDICT, RolloutOverride.success, RolloutRow.task_id, RolloutRow.seed)
    return [
        await count(found, RolloutRow, FAULT_MESSAGE, only=RolloutRow.error.is_not(None)),
        await count(found, join(RolloutRow, _TAGS, _TAGS.c.rollout_pk == RolloutRow.id), _TAGS.c.tag),
        await count(found, _JUDGED, VERDICT, JudgementRow.success, only=_IS_JUDGED),
        await count(found, _REVIEWED, *given, only=is_newest_verdict()),
    ]


def _sum(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    found = Counter[str]()
    for name, num in counts:
        found[name] += num
    return found


def _listed(counts: Counter[str]) -> list[Count]:
    return [Count(name=name, count=num) for name, num in counts.most_common(_MOST)]


def tally_of(counts: Iterable[tuple[tuple[str, int], str, int]]) -> Tally:
    """From how often each verdict was reached at a task and seed; faults have none, and open rollouts say nothing."""
    found: Tally = defaultdict(dict)
    for (task, seed), verdict, num in counts:
        seeds = found[task]
        if verdict != "open":
            won, done = seeds.get(seed, (0, 0))
            seeds[seed] = (won + num * (verdict == "success"), done + num * (verdict != "fault"))
    return found


def rate_of(tally: Mapping[str, Mapping[int, tuple[int, int]]]) -> Rate:
    """Success over task instances, all of which count alike; of a single one, over its rollouts."""
    instances = [counts for seeds in tally.values() for counts in seeds.values()]
    return make_task_rate(sum_tasks(instances), len(instances))


def _moves(reviewed: _Counts) -> Iterable[tuple[tuple[str, int], str, int]]:
    """What the verdicts of people change in a tally; a fault stays one, whatever the screen shows."""
    for (recorded, success, task, seed), num in reviewed.items():
        if recorded in ("success", "failure"):
            yield (task, seed), recorded, -num
            yield (task, seed), "success" if success else "failure", num


def _opinions(counts: _Counts) -> list[schemas.SecondOpinion]:
    sums = Counter[tuple[str, bool]]()
    for (recorded, success, *_), num in counts.items():
        sums[recorded, success] += num
    return [
        schemas.SecondOpinion(recorded=recorded, success=success, count=num)
        for (recorded, success), num in sums.most_common()
    ]


def _tasks(tally: Tally, totals: Counter[str]) -> list[schemas.SetTask]:
    """Those with the most failures first."""
    found = [
        schemas.SetTask(task_id=task, num_rollouts=totals[task], success=rate_of({task: seeds}))
        for task, seeds in tally.items()
    ]
    return sorted(found, key=lambda one: (one.success.num_successes - one.success.num_rollouts, one.task_id))


def _steps(counts: _Counts) -> list[schemas.SetStep]:
    """Training steps, then evaluations, each in order."""
    verdicts, causes = defaultdict[Any, Counter[str]](Counter), defaultdict[Any, Counter[str]](Counter)
    for (phase, step, verdict, cause), num in counts.items():
        verdicts[phase, step][verdict] += num
        if verdict == "failure":
            causes[phase, step][cause] += num
    return [
        schemas.SetStep(
            phase=phase,  # pyright: ignore[reportArgumentType] - the table allows nothing else
            step=step,
            num_rollouts=of["success"] + of["failure"],
            num_successes=of["success"],
            num_faults=of["fault"],
            causes=causes[phase, step],
        )
        for (phase, step), of in sorted(verdicts.items(), key=lambda one: (one[0][0] != "step", one[0][1], one[0][0]))
    ]
