"""Summaries of runs for lists: a few statements, however many runs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Double, and_, case, cast, exists, func, or_, select
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from cua_rl.database.models import Eval, Group, StatusChange, Step, Training
from cua_rl.database.monitor_models import NoteRow, Project, ProjectRun
from cua_rl.evaluation.statistics import NO_TASKS, TaskSums
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import AnySelect, Database
from cua_rl.monitor.figures import columns, curve_ends, finite, make_rate, thin
from cua_rl.reporting.alerts import NUM_STEPS, Alert, find_alerts, find_stall
from cua_rl.reporting.pace import RECENT_STEPS, Attempt, Span, TimeLeft, evaluations_due
from cua_rl.types.json_values import mapping, sequence

_ALIVE_S = 60.0
_RECENT_ROWS = 8 * RECENT_STEPS  # asynchronous runs start many steps ahead of the one that is trained
SPARKLINE_POINTS = 60


async def summarise(
    session: AsyncSession, database: Database, trainings: Sequence[Training]
) -> list[schemas.RunSummary]:
    """Summaries of all these runs with eleven statements."""
    ids = [training.id for training in trainings]
    if not ids:
        return []
    success = await step_success(session, ids)
    evaluations = await evaluation_success(session, ids)
    attempts = await _attempts(session, trainings)
    running = await _running_steps(session, [one for one in ids if not attempts[one].is_starting])
    alerts = await _alerts(session, trainings, attempts)
    senders = select(ProjectRun.training_id, Project.name).join(Project, Project.id == ProjectRun.project_id)
    senders = senders.where(ProjectRun.training_id.in_(ids))
    projects = {row.training_id: row.name for row in await session.execute(senders)}
    tagged: AnySelect = select(NoteRow.training_id, NoteRow.tag).where(
        NoteRow.training_id.in_(ids), NoteRow.tag.is_not(None)
    )
    tags: dict[int, list[str]] = defaultdict(list)
    for one, tag in await session.execute(tagged.where(NoteRow.rollout_pk.is_(None)).order_by(NoteRow.id)):
        tags[one].append(tag)
    return [
        _summary(
            database,
            training,
            tags[training.id],
            alerts.get(training.id, []),
            projects.get(training.id),
            success.get(training.id, []),
            evaluations.get(training.id, []),
            attempts[training.id],
            running.get(training.id),
        )
        for training in trainings
    ]


_StepSuccess = tuple[int, TaskSums, float | None]  # step, success, mean reward


@cache
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


def task_sums(successes: Any, rollouts: Any) -> Any:
    """An aggregate of the `TaskSums` over rows with these columns, each row a task; see `parse_sums`."""
    done = cast(func.nullif(rollouts, 0), Double)  # by itself, SQLAlchemy divides by a NUMERIC, which is slow
    rate = cast(successes, Double) / done
    return array(
        [
            cast(func.coalesce(value, 0), Double)
            for value in (
                func.count(rate),
                func.sum(rate),
                func.sum(rate * rate),
                func.sum(1.0 / done),
                func.sum(successes),
                func.sum(rollouts),
                func.sum(case((rollouts == 0, 1), else_=0)),
            )
        ]
    )


def parse_sums(values: Sequence[float] | None) -> TaskSums:
    """What `task_sums` gave; None, as from an outer join, stands for no task."""
    return TaskSums(*values) if values else NO_TASKS


@cache
def group_sums() -> tuple[Any, Any]:
    """Columns of success and mean reward over groups, all of which count alike; making them costs some ms."""
    return task_sums(Group.num_successes, Group.num_rollouts), func.avg(Group.reward_mean)


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
    for training_id, step, sums, reward in await session.execute(query):
        found[training_id].append((step, parse_sums(sums), reward))
    return found


_EvalSuccess = tuple[str, int, TaskSums]  # phase, step, success


async def evaluation_success(session: AsyncSession, ids: Sequence[int]) -> dict[int, list[_EvalSuccess]]:
    """Success of the completed evaluations of each run, in order; the first results of a running one are biased."""
    query = (
        select(Eval.training_id, Eval.phase, Eval.step, group_sums()[0])
        .join(Group, Group.eval_id == Eval.id)
        .where(Eval.training_id.in_(ids), Eval.status == "completed")
        .group_by(Eval.training_id, Eval.phase, Eval.step)
        .order_by(Eval.step)
    )
    found: dict[int, list[_EvalSuccess]] = defaultdict(list)
    for training_id, phase, step, values in await session.execute(query):
        if (sums := parse_sums(values)).num_tasks:
            found[training_id].append((phase, step, sums))
    return found


async def _running_steps(session: AsyncSession, ids: Sequence[int]) -> dict[int, schemas.RunningStep]:
    """The running step of each run; if an asynchronous run has started several, the one that is trained next."""
    query = (
        select(Step, group_sums()[0])
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
            success=make_rate(parse_sums(sums)),
        )
        for step, sums in await session.execute(query)
    }


def _summary(
    database: Database,
    training: Training,
    tags: list[str],
    alerts: Sequence[Alert],
    project: str | None,
    success: Sequence[_StepSuccess],
    evaluations: Sequence[_EvalSuccess],
    attempt: "_Recorded",
    running: schemas.RunningStep | None,
) -> schemas.RunSummary:
    now = datetime.now(UTC)
    rates = [sums.rate for _, sums, _ in success]
    # resumed with other tasks, a run has another baseline, and what came before is not compared with it
    baseline = next((item for item in reversed(evaluations) if item[0] == "baseline"), None)
    start = baseline[1] if baseline and baseline[1] else -1
    last_eval = next((item for item in reversed(evaluations) if item[0] == "eval" and item[1] > start), None)
    is_running = training.status == "running"
    part = min(1.0, running.num_ended_groups / max(1, running.num_groups)) if running else 0.0
    alive = is_alive(training, now)
    left = attempt.time_left(training, now) if alive else None
    seen = now if alive else training.heartbeat_at if is_running else training.updated_at
    return schemas.RunSummary(
        **columns(training, log_path=str(database.folder or training.log_path)),
        run_id=database.run_id(training.id),
        tags=tags,
        alerts=[schemas.AlertShown.model_validate(alert) for alert in alerts],
        project=project,
        model_name=model_name(training.config),
        is_alive=alive,
        progress=share_done(training.num_completed_steps + part, training.total_steps, training.status == "completed"),
        step_time_s=attempt.times.step_time_s,
        eta_s=None if left is None else left.seconds,
        eta_is_lower_bound=left is not None and left.is_lower_bound,
        elapsed_s=max(0.0, ((training.ended_at or seen) - training.started_at).total_seconds()),
        success_rate=rates[-1] if rates else None,
        reward_mean=finite(success[-1][2]) if success else None,
        success_step=success[-1][0] if success else None,
        running_step=running,
        baseline=None if baseline is None else make_rate(baseline[2]),
        baseline_step=None if baseline is None else baseline[1],
        last_eval=None if last_eval is None else make_rate(last_eval[2]),
        last_eval_step=None if last_eval is None else last_eval[1],
        sparkline=thin(rates, SPARKLINE_POINTS),
        curve_ends=curve_ends(training.config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What the latest attempt of a run has done, and the steps that evaluations have followed."""

    times: Attempt
    evaluated: frozenset[int]
    is_starting: bool
    """Nothing has begun since the run was started or resumed: steps of kept groups are not under way yet."""

    def time_left(self, training: Training, now: datetime) -> TimeLeft | None:
        """By the formula of the console, for evaluations as the configuration asks for them."""
        config, total, done = training.config, training.total_steps, training.num_completed_steps
        every, owed = config.get("eval_every"), list[int]()
        if isinstance(every, int) and every >= 0 and config.get("num_eval_tasks"):
            due = evaluations_due(eval_every=every, after=done, total_steps=total)
            owed = [step for step in due if step not in self.evaluated]
        return self.times.time_left(num_steps=max(0, total - done), owed=owed, total_steps=total, now=now.timestamp())


async def _attempts(session: AsyncSession, trainings: Sequence[Training]) -> dict[int, _Recorded]:
    """The latest steps of each run's latest attempt, and its evaluations."""
    ids = [training.id for training in trainings]
    place = func.row_number().over(partition_by=Step.training_id, order_by=Step.step.desc()).label("place")
    mine = and_(Step.training_id == Training.id, Step.attempt_id == Training.attempt_id)
    numbered = select(Step.training_id, Step.status, Step.started_at, Step.ended_at, place).join(Training, mine)
    last = numbered.where(Step.training_id.in_(ids)).subquery()
    began = select(StatusChange.training_id, func.max(StatusChange.changed_at)).group_by(StatusChange.training_id)
    began = began.where(StatusChange.training_id.in_(ids), StatusChange.new_status == "running")
    began_at = {one: at.timestamp() for one, at in await session.execute(began)}
    steps: dict[int, list[Span]] = defaultdict(list)
    kept = or_(last.c.status == "completed", last.c.ended_at.is_(None))
    for row in await session.execute(select(last).where(last.c.place <= _RECENT_ROWS, kept)):
        start = row.started_at.timestamp()
        steps[row.training_id].append((start, row.ended_at.timestamp() if row.ended_at else inf))
    evaluations: dict[int, list[Span]] = defaultdict(list)
    evaluated: dict[int, set[int]] = defaultdict(set)
    is_current = or_(Eval.ended_at.is_not(None), Eval.attempt_id == Training.attempt_id)
    query = select(Eval).join(Training, and_(Eval.training_id == Training.id, is_current))
    for row in await session.scalars(query.where(Eval.training_id.in_(ids))):
        if row.status == "completed":
            evaluated[row.training_id].add(row.step)
        if row.status in ("completed", "running"):
            span = (row.started_at.timestamp(), row.ended_at.timestamp() if row.ended_at else inf)
            evaluations[row.training_id].append(span)
    found: dict[int, _Recorded] = {}
    for training in trainings:
        one, since = training.id, began_at.get(training.id, 0.0) if training.num_attempts > 1 else 0.0
        # steps of kept groups began in an earlier attempt
        starts = [start for start, _ in (*steps[one], *evaluations[one]) if start >= since]
        times = Attempt(
            began_at=min((start for start, _ in steps[one] if start >= since), default=since),
            steps=steps[one],
            evaluations=evaluations[one],
        )
        found[one] = _Recorded(times=times, evaluated=frozenset(evaluated[one]), is_starting=not starts)
    return found


async def _alerts(
    session: AsyncSession, trainings: Sequence[Training], attempts: Mapping[int, _Recorded]
) -> dict[int, list[Alert]]:
    """Alerts of the runs that have not ended."""
    running = [training for training in trainings if training.status == "running"]
    if not running:
        return {}
    ids = [training.id for training in running]
    place = func.row_number().over(partition_by=Step.training_id, order_by=Step.step.desc()).label("place")
    numbered = select(Step.training_id, Step.step, Step.metrics, place).where(Step.training_id.in_(ids))
    latest = numbered.where(Step.metrics.is_not(None)).subquery()
    metrics: dict[int, list[Mapping[str, object]]] = defaultdict(list)
    query: AnySelect = select(latest).where(latest.c.place <= NUM_STEPS).order_by(latest.c.step)
    for row in await session.execute(query):
        metrics[row.training_id].append(row.metrics)
    moved = {training.id: training.started_at for training in running}
    for table in (Step, Eval):
        last = select(table.training_id, func.max(table.updated_at)).where(table.training_id.in_(ids))
        for one, at in await session.execute(last.group_by(table.training_id)):
            moved[one] = max(moved[one], at)
    now, found = datetime.now(UTC), dict[int, list[Alert]]()
    for training in running:
        quiet_s = (now - moved[training.id]).total_seconds()
        attempt = attempts[training.id]
        stall = None if attempt.is_starting else find_stall(quiet_s, attempt.times.step_time_s)
        if not is_alive(training, now):
            silent_s = (now - training.heartbeat_at).total_seconds()
            stall = Alert(kind="stalled", message=f"no heartbeat for {silent_s / 60:.0f} minutes: its process is gone")
        alerts = find_alerts(metrics[training.id], training.config)
        found[training.id] = alerts if stall is None else [stall, *alerts]
    return found


def is_alive(training: Training, now: datetime | None = None) -> bool:
    """Whether the run is in progress: it has not ended, and its last heartbeat is less than a minute old."""
    silent_s = ((now or datetime.now(UTC)) - training.heartbeat_at).total_seconds()
    return training.status == "running" and silent_s < _ALIVE_S


def share_done(num_steps: float, total_steps: int, is_completed: bool) -> float:
    """Share of completed steps; a run without steps, such as an evaluation, is done when it is completed."""
    return min(1.0, num_steps / total_steps) if total_steps else float(is_completed)


def model_name(config: Mapping[str, Any]) -> str | None:
    """The configured model name without its commit, else the name of the model's folder, else those of `models`."""
    name = str(config.get("model_name") or "").partition("@")[0]
    names = [str(named) for model in sequence(config.get("models")) if (named := mapping(model).get("name"))]
    return name or Path(str(config.get("model_path") or "")).name or ", ".join(names) or None
