"""Summaries of runs for lists: a few statements, however many runs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from cua_rl.database.models import Eval, Group, Step, Training
from cua_rl.database.monitor_models import Project, ProjectRun
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import Database
from cua_rl.monitor.figures import finite, make_rate, thin

_ALIVE_S = 60.0
_SPARKLINE_POINTS = 60


async def summarise(
    session: AsyncSession, database: Database, trainings: Sequence[Training]
) -> list[schemas.RunSummary]:
    """Summaries of all these runs with five statements."""
    ids = [training.id for training in trainings]
    if not ids:
        return []
    success = await step_success(session, ids)
    evaluations = await evaluation_success(session, ids)
    # durations of the last ten finished steps of each run
    place = func.row_number().over(partition_by=Step.training_id, order_by=Step.step.desc()).label("place")
    took = func.extract("epoch", Step.ended_at - Step.started_at).label("took")
    last = select(Step.training_id, took, place).where(Step.training_id.in_(ids), Step.ended_at.is_not(None)).subquery()
    times: dict[int, list[float]] = defaultdict(list)
    for training_id, seconds in await session.execute(
        select(last.c.training_id, last.c.took).where(last.c.place <= 10)
    ):
        times[training_id].append(float(seconds))
    running = await _running_steps(session, ids)
    senders = select(ProjectRun.training_id, Project.name).join(Project, Project.id == ProjectRun.project_id)
    senders = senders.where(ProjectRun.training_id.in_(ids))
    projects = {row.training_id: row.name for row in await session.execute(senders)}
    return [
        _summary(
            database,
            training,
            projects.get(training.id),
            success.get(training.id, []),
            evaluations.get(training.id, []),
            times.get(training.id, []),
            running.get(training.id),
        )
        for training in trainings
    ]


_StepSuccess = tuple[int, int, int, float | None]  # step, successes, rollouts, mean reward


def is_finished() -> ColumnElement[bool]:
    """True for a step (joined with its training) that is trained, so that its slow rollouts are counted too.

    Other systems (`image_token_id` is 0) do not report this: their step is finished when the next one has started.
    """
    later = aliased(Step)
    has_next = exists().where(later.training_id == Step.training_id, later.step > Step.step)
    return or_(
        Step.status == "completed",
        and_(Training.image_token_id == 0, or_(Training.status != "running", has_next)),
    )


def group_sums() -> tuple[Any, Any, Any]:
    """Columns of successes, rollouts and mean reward over groups."""
    rollouts = func.sum(Group.num_rollouts)
    reward = func.sum(Group.reward_mean * Group.num_rollouts) / func.nullif(rollouts, 0)
    return func.sum(Group.num_successes), rollouts, reward


async def step_success(session: AsyncSession, ids: Sequence[int]) -> dict[int, list[_StepSuccess]]:
    """Success of the finished steps of each run, in order."""
    query = (
        select(Group.training_id, Step.step, *group_sums())
        .join(Step, Group.step_id == Step.id)
        .join(Training, Step.training_id == Training.id)
        .where(Group.training_id.in_(ids), Group.status == "completed", is_finished())
        .group_by(Group.training_id, Step.step)
        .order_by(Step.step)
    )
    found: dict[int, list[_StepSuccess]] = defaultdict(list)
    for training_id, step, successes, rollouts, reward in await session.execute(query):
        found[training_id].append((step, int(successes or 0), int(rollouts or 0), reward))
    return found


_EvalSuccess = tuple[str, int, int, int]  # phase, step, successes, rollouts


async def evaluation_success(session: AsyncSession, ids: Sequence[int]) -> dict[int, list[_EvalSuccess]]:
    """Success of the completed evaluations of each run, in order; the first results of a running one are biased."""
    successes, rollouts, _ = group_sums()
    query = (
        select(Eval.training_id, Eval.phase, Eval.step, successes, rollouts)
        .join(Group, Group.eval_id == Eval.id)
        .where(Eval.training_id.in_(ids), Eval.status == "completed")
        .group_by(Eval.training_id, Eval.phase, Eval.step)
        .order_by(Eval.step)
    )
    found: dict[int, list[_EvalSuccess]] = defaultdict(list)
    for training_id, phase, step, won, done in await session.execute(query):
        if done:
            found[training_id].append((phase, step, int(won or 0), int(done)))
    return found


async def _running_steps(session: AsyncSession, ids: Sequence[int]) -> dict[int, schemas.RunningStep]:
    """The running step of each run; if an asynchronous run has started several, the one that is trained next."""
    successes, rollouts, _ = group_sums()
    query = (
        select(Step, successes.label("successes"), rollouts.label("rollouts"))
        .join(Training, Step.training_id == Training.id)
        .outerjoin(Group, and_(Group.step_id == Step.id, Group.status == "completed"))
        .where(Step.training_id.in_(ids), Step.status.in_(("rollouts", "training")), Training.status == "running")
        .where(~is_finished())
        .group_by(Step.id)
        .order_by(Step.step.desc())
    )
    return {
        step.training_id: schemas.RunningStep(
            step=step.step,
            num_groups=step.num_groups,
            num_ended_groups=step.num_ended_groups,
            success=make_rate(won, done),
        )
        for step, won, done in await session.execute(query)
    }


def _summary(
    database: Database,
    training: Training,
    project: str | None,
    success: Sequence[_StepSuccess],
    evaluations: Sequence[_EvalSuccess],
    times: Sequence[float],
    running: schemas.RunningStep | None,
) -> schemas.RunSummary:
    now = datetime.now(UTC)
    rates = [successes / rollouts if rollouts else None for _, successes, rollouts, _ in success]
    baseline = next((item for item in evaluations if item[0] == "baseline"), None)
    last_eval = next((item for item in reversed(evaluations) if item[0] == "eval"), None)
    step_time_s = median(times) if times else None
    is_running = training.status == "running"
    part = min(1.0, running.num_ended_groups / max(1, running.num_groups)) if running else 0.0
    left = max(0.0, training.total_steps - training.num_completed_steps - part)
    alive = is_alive(training, now)
    is_predictable = alive and left > 0 and step_time_s is not None
    seen = now if alive else training.heartbeat_at if is_running else training.updated_at
    return schemas.RunSummary(
        run_id=database.run_id(training.id),
        run_name=training.run_name,
        log_path=training.log_path,
        project=project,
        model_name=model_name(training.config),
        status=training.status,  # pyright: ignore[reportArgumentType] - the table allows nothing else
        is_alive=alive,
        error=training.error,
        num_completed_steps=training.num_completed_steps,
        total_steps=training.total_steps,
        progress=min(1.0, (training.num_completed_steps + part) / max(1, training.total_steps)),
        step_time_s=step_time_s,
        eta_s=left * (step_time_s or 0.0) if is_predictable else None,
        elapsed_s=max(0.0, ((training.ended_at or seen) - training.started_at).total_seconds()),
        started_at=training.started_at,
        ended_at=training.ended_at,
        heartbeat_at=training.heartbeat_at,
        num_attempts=training.num_attempts,
        success_rate=rates[-1] if rates else None,
        reward_mean=finite(success[-1][3]) if success else None,
        success_step=success[-1][0] if success else None,
        running_step=running,
        baseline=None if baseline is None else make_rate(baseline[2], baseline[3]),
        last_eval=None if last_eval is None else make_rate(last_eval[2], last_eval[3]),
        last_eval_step=None if last_eval is None else last_eval[1],
        sparkline=thin(rates, _SPARKLINE_POINTS),
    )


def is_alive(training: Training, now: datetime | None = None) -> bool:
    """Whether the run is in progress: it has not ended, and its last heartbeat is less than a minute old."""
    silent_s = ((now or datetime.now(UTC)) - training.heartbeat_at).total_seconds()
    return training.status == "running" and silent_s < _ALIVE_S


def model_name(config: Mapping[str, Any]) -> str | None:
    """The configured model name, else the name of the model's folder."""
    name = config.get("model_name") or config.get("model_path")
    return (
        None
        if not name
        else Path(str(name)).name
        if "/" in str(name) and config.get("model_name") is None
        else str(name)
    )
