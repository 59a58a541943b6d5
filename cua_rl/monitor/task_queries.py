"""Queries about tasks: the hardest ones, and the history and failures of one."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, literal_column, select

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TaskRow, TurnRow, ValidationRow
from cua_rl.evaluation.statistics import NO_TASKS, independent_sums, sum_tasks
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import AnySelect, NotFoundError, RunAccess
from cua_rl.monitor.figures import columns, curve_ends, finite_mean, make_rate, make_task_rate, task_fields
from cua_rl.monitor.rollout_queries import failed_rollouts
from cua_rl.monitor.rollout_sets import CAUSE, is_own_turn
from cua_rl.monitor.run_summaries import group_sums, parse_sums, task_sums
from cua_rl.monitor.schemas import Rate


async def list_tasks(run: RunAccess) -> list[schemas.TaskStats]:
    """Tasks of the run: trained ones, hardest first, then those that are only evaluated."""
    is_recent = Step.step > int(run.training.num_completed_steps * 0.75)  # the last quarter, and what follows
    successes, rollouts = func.sum(Group.num_successes), func.sum(Group.num_rollouts)
    by_instance = (
        select(
            Group.task_id,
            func.max(TaskRow.instruction).label("instruction"),
            func.max(TaskRow.category).label("category"),
            func.max(TaskRow.difficulty).label("difficulty"),
            func.count().label("num_groups"),
            func.count().filter(Group.num_successes == 0, Group.num_rollouts > 0).label("num_failed_groups"),
            successes.label("successes"),
            rollouts.label("rollouts"),
            successes.filter(is_recent).label("recent_successes"),
            rollouts.filter(is_recent).label("recent_rollouts"),
            func.max(Step.step).label("last_step"),
        )
        .join(Step, Group.step_id == Step.id)
        .outerjoin(TaskRow, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.status == "completed")
        .group_by(Group.task_id, Group.seed)
        .subquery()
    )
    one = by_instance.c
    query = select(
        one.task_id,
        func.max(one.instruction).label("instruction"),
        func.max(one.category).label("category"),
        func.max(one.difficulty).label("difficulty"),
        func.sum(one.num_groups).label("num_groups"),
        func.sum(one.num_failed_groups).label("num_failed_groups"),
        func.count().label("num_instances"),
        task_sums(one.successes, one.rollouts).label("success"),
        task_sums(one.recent_successes, one.recent_rollouts).label("recent"),
        func.max(one.last_step).label("last_step"),
    ).group_by(one.task_id)
    held_out = await _held_out(run)
    found = [
        schemas.TaskStats(
            **columns(row, success=_task_rate(row, "success"), recent=_task_rate(row, "recent")),
            **_evaluated(held_out.pop(row.task_id, None)),
        )
        for row in await run.session.execute(query)
    ]
    found.sort(key=lambda task: (task.recent.high, task.success.high, task.task_id))
    return found + [_only_evaluated(row) for row in held_out.values()]


async def _held_out(run: RunAccess) -> dict[str, Any]:
    """By task: its description, and its success in the latest evaluation with it, as instances and their sums."""
    query = (
        select(
            Group.task_id,
            func.max(TaskRow.instruction).label("instruction"),
            func.max(TaskRow.category).label("category"),
            func.max(TaskRow.difficulty).label("difficulty"),
            func.count(Group.seed.distinct()).label("num_instances"),
            group_sums()[0].label("success"),
            *(Eval.phase, Eval.step),
        )
        .join(Eval, Group.eval_id == Eval.id)
        .outerjoin(TaskRow, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.status == "completed")
        .group_by(Group.task_id, Eval.step, Eval.phase)
        .order_by(Group.task_id, Eval.step, Eval.phase)  # the last of each task stays; "baseline" is before "eval"
    )
    return {row.task_id: row for row in await run.session.execute(query)}


def _task_rate(row: Any, name: str) -> Rate:
    return make_task_rate(parse_sums(row._mapping[name]), row.num_instances)


def _evaluated(row: Any) -> dict[str, Any]:
    if row is None:
        return {"held_out": make_rate(NO_TASKS), "held_out_in": None}
    return {"held_out": _task_rate(row, "success"), "held_out_in": schemas.SourceRef(phase=row.phase, step=row.step)}


def _only_evaluated(row: Any) -> schemas.TaskStats:
    nothing = make_rate(NO_TASKS)
    untrained = columns(row, num_groups=0, num_failed_groups=0, success=nothing, recent=nothing, last_step=None)
    return schemas.TaskStats(**untrained, **_evaluated(row))


async def load_task(run: RunAccess, task_id: str, limit: int) -> schemas.TaskDetail:
    """One task of a run with at most `limit` rows in each of its lists; raises `NotFoundError`."""
    task = await run.session.scalar(
        select(TaskRow)
        .join(Group, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id)
        .order_by(Group.id.desc())
        .limit(1)
    )
    history, training = await _history(run, task_id)
    if not history and task is None:
        raise NotFoundError(
            f"expected the task_id of a task of {run.training.run_name!r}, got {task_id[:120]!r}; see the run's tasks"
        )
    trained = [point for point in history if point.phase == "step"]
    baseline = next((point for point in reversed(history) if point.phase == "baseline"), None)
    start = baseline.step if baseline and baseline.step else -1  # see run_summaries.py
    evaluated = [point for point in history if point.phase == "eval" and point.step > start]
    scope = await _scope(run, task_id, is_trained=bool(trained))
    checks = _failed(
        run, task_id, scope, ValidationRow.query, ValidationRow.expected, ValidationRow.actual, ValidationRow.success
    )
    checks = checks.join(ValidationRow, ValidationRow.rollout_pk == RolloutRow.id)
    num_checks, found_checks = await _first(run, checks, limit)
    num_instances, instances = await _instances(run, task_id, scope, limit)
    num_failed, failed = await failed_rollouts(run, task_id, limit)
    unparsed = (
        select(TurnRow.failure_kind, func.count())
        .join(RolloutRow, and_(is_own_turn(RolloutRow), TurnRow.failure_kind.is_not(None)))
        .join(Group, RolloutRow.group_pk == Group.id)
        .where(RolloutRow.training_id == run.training.id, RolloutRow.task_id == task_id, scope.condition)
        .group_by(TurnRow.failure_kind)
        .order_by(func.count().desc())
    )
    return schemas.TaskDetail(
        **task_fields(task) | dict[str, Any](task_id=task_id),
        run_id=run.run_id,
        run_name=run.training.run_name,
        alias=run.training.alias,
        training=training,
        baseline=baseline,
        last_eval=evaluated[-1] if evaluated else None,
        last_eval_step=evaluated[-1].step if evaluated else None,
        curve_ends=curve_ends(run.training.config),
        history=history,
        examined=scope.ref,
        instances=instances,
        num_instances=num_instances,
        stop_reasons=await _counts(run, _failed(run, task_id, scope, CAUSE)),
        failed_checks=[schemas.CheckCount(**row._asdict()) for row in found_checks],
        num_failed_checks=num_checks,
        turn_failures=await _counts(run, unparsed),
        failed_rollouts=failed,
        num_failed_rollouts=num_failed,
    )


@dataclass(frozen=True, slots=True)
class _Scope:
    """The groups of a task that are analysed together; before training, a policy fails differently."""

    condition: ColumnElement[bool]
    ref: schemas.SourceRef | None
    """None: all training steps."""


async def _scope(run: RunAccess, task_id: str, *, is_trained: bool) -> _Scope:
    """All training steps, or the latest evaluation for tasks that are only evaluated."""
    if is_trained:
        return _Scope(Group.step_id.is_not(None), None)
    query = (
        select(Eval.id, Eval.phase, Eval.step)
        .join(Group, Group.eval_id == Eval.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id, Group.status == "completed")
        .order_by(Eval.step.desc(), Eval.phase.desc())
        .limit(1)
    )
    row = (await run.session.execute(query)).one_or_none()
    if row is None:
        return _Scope(Group.step_id.is_not(None), None)
    return _Scope(Group.eval_id == row.id, schemas.SourceRef(phase=row.phase, step=row.step))


async def _history(run: RunAccess, task_id: str) -> tuple[list[schemas.TaskPoint], Rate]:
    """The task's success in each step and evaluation, and over all training steps by its instances."""
    phase: Any = func.coalesce(Eval.phase, literal_column("'step'"))
    step = func.coalesce(Step.step, Eval.step)
    query = (
        select(phase.label("phase"), step.label("step"), Group.seed, Group.num_successes, Group.num_rollouts)
        .add_columns(Group.reward_mean)
        .outerjoin(Step, Group.step_id == Step.id)
        .outerjoin(Eval, Group.eval_id == Eval.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id, Group.status == "completed")
    )
    points: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    seeds: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    all_seeds: set[int] = set()
    for row in await run.session.execute(query):
        points[row.phase, row.step].append(row)
        all_seeds.add(row.seed)
        if row.phase == "step":
            won, done = seeds[row.seed]
            seeds[row.seed] = won + (row.num_successes or 0), done + (row.num_rollouts or 0)
    found = [
        schemas.TaskPoint(
            phase=name,  # pyright: ignore[reportArgumentType] - the table allows nothing else
            step=number,
            reward_mean=finite_mean([row.reward_mean for row in rows if row.reward_mean is not None]),
            **make_task_rate(
                sum_tasks((row.num_successes or 0, row.num_rollouts or 0) for row in rows), len(all_seeds)
            ).model_dump(),
        )
        for (name, number), rows in points.items()
    ]
    training = make_task_rate(sum_tasks(seeds.values()), len(seeds))
    return sorted(found, key=lambda point: (point.phase != "step", point.step, point.phase)), training


async def _first(run: RunAccess, query: AnySelect, limit: int) -> tuple[int, list[Any]]:
    """How many rows a query without a limit has, and the first of them."""
    total = await run.session.scalar(select(func.count()).select_from(query.order_by(None).subquery()))
    return total or 0, list(await run.session.execute(query.limit(limit)))


async def _instances(run: RunAccess, task_id: str, scope: _Scope, limit: int) -> tuple[int, list[schemas.TaskInstance]]:
    rollouts = func.sum(Group.num_rollouts)
    query = (
        select(
            Group.seed,
            func.max(TaskRow.instruction).label("instruction"),
            func.sum(Group.num_successes).label("successes"),
            rollouts.label("rollouts"),
            func.max(Step.step).label("last_step"),
        )
        .outerjoin(TaskRow, Group.task_pk == TaskRow.id)
        .outerjoin(Step, Group.step_id == Step.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id, Group.status == "completed")
        .where(scope.condition)
        .group_by(Group.seed)
        .order_by(func.sum(Group.num_successes) / func.nullif(rollouts, 0), Group.seed)
    )
    total, rows = await _first(run, query, limit)
    return total, [
        schemas.TaskInstance(**columns(row), success=make_rate(independent_sums(row.successes or 0, row.rollouts or 0)))
        for row in rows
    ]


def _failed(run: RunAccess, task_id: str, scope: _Scope, *names: Any) -> AnySelect:
    """Failed rollouts of a task, counted by `names`."""
    return (
        select(*names, func.count().label("count"))
        .select_from(RolloutRow)
        .join(Group, RolloutRow.group_pk == Group.id)
        .where(
            scope.condition,
            RolloutRow.training_id == run.training.id,
            RolloutRow.task_id == task_id,
            RolloutRow.success.is_not(True),
            RolloutRow.status == "completed",
        )
        .group_by(*names)
        .order_by(func.count().desc())
    )


async def _counts(run: RunAccess, query: AnySelect) -> list[schemas.Count]:
    rows: Sequence[Any] = (await run.session.execute(query)).all()
    return [schemas.Count(name=str(row[0]), count=row[-1]) for row in rows]
