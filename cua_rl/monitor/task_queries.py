"""Queries about tasks: the hardest ones, and the history and failures of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, literal_column, select

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TaskRow, TurnRow, ValidationRow
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import AnySelect, NotFoundError, RunAccess
from cua_rl.monitor.failure_queries import failure_kind
from cua_rl.monitor.figures import finite, make_rate
from cua_rl.monitor.rollout_queries import failed_rollouts
from cua_rl.monitor.run_summaries import group_sums

_MAX_INSTANCES, _MAX_CHECKS, _MAX_ROLLOUTS = 100, 10, 20


async def list_tasks(run: RunAccess) -> list[schemas.TaskStats]:
    """Tasks of the run: trained ones, hardest first, then those that are only evaluated."""
    last_step = await run.session.scalar(select(func.max(Step.step)).where(Step.training_id == run.training.id))
    is_recent = Step.step > int((last_step or 0) * 0.75)  # the last quarter of the run's steps
    successes, rollouts = func.sum(Group.num_successes), func.sum(Group.num_rollouts)
    query = (
        select(
            Group.task_id,
            func.max(TaskRow.instruction).label("instruction"),
            func.max(TaskRow.category).label("category"),
            func.max(TaskRow.difficulty).label("difficulty"),
            func.count().label("num_groups"),
            func.count().filter(Group.num_successes == 0).label("num_failed_groups"),
            successes.label("successes"),
            rollouts.label("rollouts"),
            successes.filter(is_recent).label("recent_successes"),
            rollouts.filter(is_recent).label("recent_rollouts"),
            func.max(Step.step).label("last_step"),
        )
        .join(Step, Group.step_id == Step.id)
        .outerjoin(TaskRow, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.status == "completed")
        .group_by(Group.task_id)
    )
    held_out = await _held_out(run)
    found = [
        schemas.TaskStats(
            task_id=row.task_id,
            instruction=row.instruction,
            category=row.category,
            difficulty=row.difficulty,
            num_groups=row.num_groups,
            num_failed_groups=row.num_failed_groups,
            success=make_rate(row.successes, row.rollouts),
            recent=make_rate(row.recent_successes, row.recent_rollouts),
            held_out=make_rate(*held_out.pop(row.task_id, (0, 0))[-2:]),
            last_step=row.last_step,
        )
        for row in await run.session.execute(query)
    ]
    found.sort(key=lambda task: (task.recent.high, task.success.high, task.task_id))
    return found + [_only_evaluated(*row) for row in held_out.values()]


async def _held_out(run: RunAccess) -> dict[str, Any]:
    """By task: its description, and its successes and rollouts in the latest evaluation with it."""
    query = (
        select(
            Group.task_id,
            func.max(TaskRow.instruction),
            func.max(TaskRow.category),
            func.max(TaskRow.difficulty),
            func.sum(Group.num_successes),
            func.sum(Group.num_rollouts),
        )
        .join(Eval, Group.eval_id == Eval.id)
        .outerjoin(TaskRow, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.status == "completed")
        .group_by(Group.task_id, Eval.step, Eval.phase)
        .order_by(Group.task_id, Eval.step, Eval.phase)  # the last of each task stays; "baseline" is before "eval"
    )
    return {row[0]: row for row in await run.session.execute(query)}


def _only_evaluated(
    task_id: str, instruction: str | None, category: str | None, difficulty: str | None, won: int, done: int
) -> schemas.TaskStats:
    nothing = make_rate(0, 0)
    return schemas.TaskStats(
        task_id=task_id,
        instruction=instruction,
        category=category,
        difficulty=difficulty,
        num_groups=0,
        num_failed_groups=0,
        success=nothing,
        recent=nothing,
        held_out=make_rate(won, done),
        last_step=None,
    )


async def load_task(run: RunAccess, task_id: str) -> schemas.TaskDetail:
    """Everything about one task of a run; raises `NotFoundError`."""
    task = await run.session.scalar(
        select(TaskRow)
        .join(Group, Group.task_pk == TaskRow.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id)
        .order_by(Group.id.desc())
        .limit(1)
    )
    history = await _history(run, task_id)
    if not history and task is None:
        raise NotFoundError(
            f"expected the task_id of a task of {run.training.run_name!r}, got {task_id[:120]!r}; see the run's tasks"
        )
    trained = [point for point in history if point.phase == "step"]
    evaluated = [point for point in history if point.phase == "eval"]
    scope = await _scope(run, task_id, is_trained=bool(trained))
    checks = _failed(run, task_id, scope, ValidationRow.query, ValidationRow.expected, ValidationRow.actual)
    checks = checks.join(ValidationRow, ValidationRow.rollout_pk == RolloutRow.id).limit(_MAX_CHECKS)
    unparsed = (
        select(TurnRow.failure_kind, func.count())
        .join(RolloutRow, and_(TurnRow.rollout_pk == RolloutRow.id, TurnRow.failure_kind.is_not(None)))
        .join(Group, RolloutRow.group_pk == Group.id)
        .where(RolloutRow.training_id == run.training.id, RolloutRow.task_id == task_id, scope.condition)
        .group_by(TurnRow.failure_kind)
        .order_by(func.count().desc())
    )
    return schemas.TaskDetail(
        run_id=run.run_id,
        run_name=run.training.run_name,
        task_id=task_id,
        instruction=None if task is None else task.instruction,
        category=None if task is None else task.category,
        difficulty=None if task is None else task.difficulty,
        tags=[] if task is None else list(task.tags),
        max_turns=None if task is None else task.max_turns,
        training=make_rate(sum(point.num_successes for point in trained), sum(point.num_rollouts for point in trained)),
        baseline=next((point for point in history if point.phase == "baseline"), None),
        last_eval=evaluated[-1] if evaluated else None,
        last_eval_step=evaluated[-1].step if evaluated else None,
        history=history,
        examined=scope.ref,
        instances=await _instances(run, task_id, scope),
        stop_reasons=await _counts(run, _failed(run, task_id, scope, failure_kind())),
        failed_checks=[
            schemas.Count(name=f"{row.query}: expected {row.expected!r}, got {row.actual!r}", count=row[-1])
            for row in await run.session.execute(checks)
        ],
        turn_failures=await _counts(run, unparsed),
        failed_rollouts=await failed_rollouts(run, task_id, _MAX_ROLLOUTS),
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


async def _history(run: RunAccess, task_id: str) -> list[schemas.TaskPoint]:
    phase: Any = func.coalesce(Eval.phase, literal_column("'step'"))
    step = func.coalesce(Step.step, Eval.step)
    query = (
        select(phase, step, *group_sums())
        .outerjoin(Step, Group.step_id == Step.id)
        .outerjoin(Eval, Group.eval_id == Eval.id)
        .where(Group.training_id == run.training.id, Group.task_id == task_id, Group.status == "completed")
        .group_by(phase, step)
    )
    points = [
        schemas.TaskPoint(phase=name, step=number, reward_mean=finite(reward), **make_rate(won, done).model_dump())
        for name, number, won, done, reward in await run.session.execute(query)
    ]
    return sorted(points, key=lambda point: (point.phase != "step", point.step))


async def _instances(run: RunAccess, task_id: str, scope: _Scope) -> list[schemas.TaskInstance]:
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
        .limit(_MAX_INSTANCES)
    )
    return [
        schemas.TaskInstance(
            seed=row.seed,
            instruction=row.instruction,
            success=make_rate(row.successes, row.rollouts),
            last_step=row.last_step,
        )
        for row in await run.session.execute(query)
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
            RolloutRow.status != "running",
        )
        .group_by(*names)
        .order_by(func.count().desc())
    )


async def _counts(run: RunAccess, query: AnySelect) -> list[schemas.Count]:
    rows: Sequence[Any] = (await run.session.execute(query)).all()
    return [schemas.Count(name=str(row[0]), count=row[-1]) for row in rows]
