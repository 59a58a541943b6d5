"""Writes events as rows. Blocking; runs in the recorder's thread, in its transaction.

Every insert skips rows that exist and every update is idempotent, so an event can be written again after a commit whose
answer was lost. Statuses only advance. Runs of other programs, which arrive piece by piece, are in `reports.py`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby

from sqlalchemy import Connection, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.group_writer import count_ended_groups, write_group_ends, write_rollout_starts
from cua_rl.database.models import Checkpoint, Eval, Group, RolloutRow, Step, Training, TurnRow
from cua_rl.database.rollout_writer import cancel_rollouts
from cua_rl.database.rows import (
    Scope,
    add_tasks,
    advance_status,
    find_source,
    insert_row,
    note_restart,
    note_status,
    require_source,
    source_table,
)
from cua_rl.database.session import make_writer_engine, shown_url
from cua_rl.database.turn_writer import keep_extremes, write_turns
from cua_rl.events import (
    BatchTaken,
    CheckpointSaved,
    EvaluationEnded,
    Event,
    GroupEnded,
    RolloutSource,
    RolloutStarted,
    SourceStarted,
    StepTrained,
    TrainingEnded,
    TrainingStarted,
    TurnTaken,
)
from cua_rl.types.errors import ConfigError, DatabaseError, boundary

logger = logging.getLogger(__name__)

_Inner = RolloutStarted | TurnTaken | GroupEnded
_SET_TRAINING_LOGPROBS = update(TurnRow).where(
    TurnRow.rollout_pk == bindparam("key"), TurnRow.turn_index == bindparam("index")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEvent:
    """An event and when it was reported."""

    event: Event
    at: datetime


def write_events(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
    """Write events in their order and return the scope that later events belong to; the caller commits.

    Only what happens inside steps and evaluations is written by kind, for many rollouts at a time: a rollout's start
    comes before its turns, and they before the end of its group, so their order is kept.
    """
    for is_inner, run in groupby(events, key=lambda timed: isinstance(timed.event, _Inner)):
        if is_inner:
            _write_inner(connection, scope, list(run))
            continue
        for timed in run:
            if isinstance(timed.event, TrainingStarted):
                scope = write_training_start(connection, scope, timed.event, timed.at)
            else:
                _write(connection, scope, timed.event, timed.at)
    if scope.training_id is not None:
        write_heartbeat(connection, scope, datetime.now(UTC))
    return scope


def write_worker_events(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
    """Write starts and turns of a worker's rollouts; raises `DatabaseError` if another attempt has taken over the run.

    A worker that was cut off may outlive its controller. The lock excludes a take-over until the commit, and neither
    heartbeats nor other workers. Workers have no heartbeat: the row of the training would be locked most of the time.
    """
    owner = select(Training.attempt_id).where(Training.id == scope.require_training())
    if connection.scalar(owner.with_for_update(read=True, key_share=True)) != scope.attempt_id:
        raise DatabaseError("expected the attempt that this worker belongs to, another one has taken over the run")
    _write_inner(connection, scope, _of_running_rollouts(connection, scope, events))
    return scope


def require_attempt(url: str, scope: Scope) -> float:
    """How far this machine's clock is ahead of that of the attempt's database, seconds.

    Raises `ConfigError` unless the attempt runs in this database: the variables of a worker may name another.
    """
    engine = make_writer_engine(url)
    expected = f"expected the run's database, got {shown_url(url)}"
    try:
        with boundary(DatabaseError, expected), engine.connect() as connection:
            owner = connection.scalar(select(Training.attempt_id).where(Training.id == scope.require_training()))
            before = time.time()
            theirs = float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
            ahead_s = (before + time.time()) / 2 - theirs
    finally:
        engine.dispose()
    if owner != scope.attempt_id:
        raise ConfigError(
            f"{expected}, where this attempt does not run; set DATABASE_URL as for the run, or not at all"
        )
    return ahead_s


def _of_running_rollouts(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> list[TimedEvent]:
    """Leave out events of rollouts that have ended: a worker that was given up may still write for a moment."""
    # The controller has recorded the end of such a rollout, and its group may have moved to the step that trains it.
    training_id = scope.require_training()
    groups = {timed.event.group_id for timed in events if isinstance(timed.event, RolloutStarted)}
    rollouts = {timed.event.rollout_id for timed in events if isinstance(timed.event, TurnTaken)}
    ended_groups = select(Group.group_id).where(
        Group.training_id == training_id, Group.group_id.in_(groups), Group.status != "running"
    )
    running = select(RolloutRow.rollout_id).where(
        RolloutRow.training_id == training_id, RolloutRow.rollout_id.in_(rollouts), RolloutRow.status == "running"
    )
    ended = set(connection.scalars(ended_groups)) if groups else set[str]()
    wanted = set(connection.scalars(running)) if rollouts else set[str]()
    kept: list[TimedEvent] = []
    for timed in events:  # a rollout's start comes before its turns
        match timed.event:
            case RolloutStarted(rollout_id=rollout_id, group_id=group_id) if group_id not in ended:
                wanted.add(rollout_id)
                kept.append(timed)
            case TurnTaken(rollout_id=rollout_id) if rollout_id in wanted:
                kept.append(timed)
            case _:
                logger.info("left out what a rollout did after its end: %s", type(timed.event).__name__)
    return kept


def _write_inner(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> None:
    starts = [(timed.event, timed.at) for timed in events if isinstance(timed.event, RolloutStarted)]
    turns = [timed.event for timed in events if isinstance(timed.event, TurnTaken)]
    ends = [(timed.event, timed.at) for timed in events if isinstance(timed.event, GroupEnded)]
    if starts:
        write_rollout_starts(connection, scope, starts)
    if turns:
        write_turns(connection, scope, turns)
    if ends:
        write_group_ends(connection, scope, ends)


def write_heartbeat(connection: Connection, scope: Scope, at: datetime) -> None:
    """Note that the recorder lives."""
    connection.execute(update(Training).where(Training.id == scope.training_id).values(heartbeat_at=at))


def _write(connection: Connection, scope: Scope, event: Event, at: datetime) -> None:
    training_id = scope.require_training()
    match event:
        case SourceStarted():
            _write_source_start(connection, scope, event, at)
        case BatchTaken():
            write_batch(connection, scope, event, at)
        case StepTrained():
            _write_step_end(connection, scope, event, at)
        case EvaluationEnded():
            evaluation = require_source(connection, scope, event.source)
            advance_status(connection, Eval, evaluation.id, "completed", at, metrics=event.metrics, ended_at=at)
        case CheckpointSaved():
            paths = {"state_path": event.state_path, "sampler_path": event.sampler_path}
            statement = insert(Checkpoint).values(training_id=training_id, step=event.step, **paths)
            statement = statement.on_conflict_do_update(index_elements=["training_id", "step"], set_=paths)
            connection.execute(statement)
        case TrainingEnded():
            # whatever still runs in it ends with it
            inner = "cancelled" if event.status == "completed" else event.status
            cancel_rollouts(connection, at, RolloutRow.training_id == training_id)
            for table in (Group, Step, Eval):
                is_open = table.status.in_(("rollouts", "training", "running"))
                for row_id in connection.scalars(
                    select(table.id).where(table.training_id == training_id, is_open)
                ).all():
                    advance_status(connection, table, row_id, inner, at, ended_at=at)
            advance_status(connection, Training, training_id, event.status, at, error=event.error, ended_at=at)
        case TrainingStarted() | RolloutStarted() | TurnTaken() | GroupEnded():
            raise AssertionError("handled by write_events")


def write_training_start(connection: Connection, scope: Scope, event: TrainingStarted, at: datetime) -> Scope:
    """Insert the run, or take over its row and void what an earlier attempt left; no-op if this attempt did so."""
    values = {
        "config": event.config,
        "image_token_id": scope.image_token_id,
        "attempt_id": scope.attempt_id,
        "first_step": event.first_step,
        "total_steps": event.total_steps,
        "heartbeat_at": at,
    }
    statement = insert(Training).values(
        run_name=event.run_name, log_path=event.log_path, status="running", started_at=at, **values
    )
    inserted = connection.scalar(statement.on_conflict_do_nothing().returning(Training.id))
    if inserted is not None:
        note_status(connection, Training, inserted, None, "running", at)
        return replace(scope, training_id=inserted)
    found = connection.execute(
        select(Training.id, Training.attempt_id, Training.status, Training.heartbeat_at)
        .where(Training.run_name == event.run_name, Training.log_path == event.log_path)
        .with_for_update()
    ).one()
    if found.attempt_id != scope.attempt_id:
        _void(connection, scope, found.id, event, at)
        note_restart(connection, found.id, found.status, found.heartbeat_at, at)
        restarted = {"status": "running", "error": None, "ended_at": None, "num_attempts": Training.num_attempts + 1}
        connection.execute(update(Training).where(Training.id == found.id).values(**restarted, **values))
        count_completed_steps(connection, found.id)
    return replace(scope, training_id=found.id)


def _void(connection: Connection, scope: Scope, training_id: int, event: TrainingStarted, at: datetime) -> None:
    """Delete what an earlier attempt left and the new one will do again.

    Steps and evaluations of kept groups start over, with these groups.
    """
    first_step, kept_groups = event.first_step, Group.group_id.in_(event.kept_group_ids)
    again: dict[str, object] = {"attempt_id": scope.attempt_id, "task_pks": [], "metrics": None, "ended_at": None}
    of_training = ("trained_policy_version", "datums_sha256", "num_datums", "trained_on", "adapter_sha256")
    untrained = dict.fromkeys((*of_training, "rollouts_ended_at"))
    unfinished = or_(Eval.step >= first_step, Eval.status != "completed")
    for table, parent, is_later, values in (
        (Step, Group.step_id, Step.step >= first_step, {**again, "status": "rollouts", **untrained}),
        (Eval, Group.eval_id, unfinished, {**again, "status": "running"}),
    ):
        later = set(connection.scalars(select(table.id).where(table.training_id == training_id, is_later)))
        kept = later & set(connection.scalars(select(parent).where(Group.training_id == training_id, kept_groups)))
        connection.execute(delete(table).where(table.id.in_(later - kept)))
        connection.execute(delete(Group).where(parent.in_(kept), ~kept_groups))
        connection.execute(update(table).where(table.id.in_(kept)).values(**values))
        cancel_rollouts(connection, at, RolloutRow.group_pk.in_(select(Group.id).where(parent.in_(kept))))
    connection.execute(delete(Checkpoint).where(Checkpoint.training_id == training_id, Checkpoint.step >= first_step))


def count_completed_steps(connection: Connection, training_id: int) -> None:
    done = (Step.training_id == training_id) & (Step.status == "completed")
    count = select(func.count()).select_from(Step).where(done).scalar_subquery()
    connection.execute(update(Training).where(Training.id == training_id).values(num_completed_steps=count))


def _write_source_start(connection: Connection, scope: Scope, event: SourceStarted, at: datetime) -> None:
    table = source_table(event.source)
    training_id = scope.require_training()
    existing = find_source(connection, training_id, event.source)
    extent: dict[str, object] = {
        "group_size": event.group_size,
        "num_groups": len(event.tasks) if event.num_groups is None else event.num_groups,
        "task_pks": add_tasks(connection, event.tasks),
    }
    if existing is not None and existing.attempt_id == scope.attempt_id:
        if event.tasks:  # one that was kept may have more tasks and attempts than before
            connection.execute(update(Eval).where(Eval.id == existing.id).values(**extent))
            count_ended_groups(connection, existing)
        return
    if existing is not None:  # from an earlier attempt, and about to run again
        connection.execute(delete(table).where(table.id == existing.id))
    columns: dict[str, object] = {
        "training_id": training_id,
        "step": event.source.step,
        "attempt_id": scope.attempt_id,
        "status": "rollouts" if table is Step else "running",
        "policy_version": event.policy_version,
        **extent,
        "started_at": at,
    }
    if table is Eval:
        columns["phase"] = event.source.phase
    insert_row(connection, table, columns, at)


def write_batch(connection: Connection, scope: Scope, event: BatchTaken, at: datetime) -> None:
    """Move the groups of a batch to the step that trains them."""
    step_id = require_source(connection, scope, RolloutSource(phase="step", step=event.step)).id
    mine = [Group.training_id == scope.require_training(), Group.group_id.in_(event.group_ids)]
    rows = connection.execute(
        select(Group.id, Group.task_pk).where(*mine, Group.step_id.is_not(None)).order_by(Group.group_index)
    ).all()
    if len(rows) != len(event.group_ids):
        raise DatabaseError(f"expected {len(event.group_ids)} recorded groups in step {event.step}, got {len(rows)}")
    connection.execute(update(Group).where(Group.id.in_([row.id for row in rows])).values(step_id=step_id))
    connection.execute(
        update(Step)
        .where(Step.id == step_id)
        .values(
            num_groups=len(rows),
            num_ended_groups=len(rows),
            task_pks=[row.task_pk for row in rows if row.task_pk is not None],
        )
    )
    advance_status(connection, Step, step_id, "training", at, rollouts_ended_at=at)


def _write_step_end(connection: Connection, scope: Scope, event: StepTrained, at: datetime) -> None:
    step_id = require_source(connection, scope, RolloutSource(phase="step", step=event.step)).id
    rows = connection.execute(
        select(RolloutRow.rollout_id, RolloutRow.id).where(
            RolloutRow.training_id == scope.training_id, RolloutRow.rollout_id.in_(list(event.training_logprobs))
        )
    ).all()
    keys = {row.rollout_id: row.id for row in rows}
    for rollout_id in event.training_logprobs:
        if rollout_id not in keys:
            raise DatabaseError(f"expected rollout {rollout_id!r} of step {event.step} to be recorded, got no such row")
    values = [
        {"key": keys[rollout_id], "index": turn_index, "training_logprobs": list(logprobs)}
        for rollout_id, turns in event.training_logprobs.items()
        for turn_index, logprobs in turns
    ]
    if values:
        connection.execute(_SET_TRAINING_LOGPROBS, values)
        keep_extremes(connection, keys.values())
    advance_status(
        connection,
        Step,
        step_id,
        "completed",
        at,
        trained_policy_version=event.policy_version,
        datums_sha256=event.datums_sha256,
        num_datums=event.num_datums,
        trained_on=event.trained_on,
        adapter_sha256=event.adapter_sha256,
        metrics=event.metrics,
        ended_at=at,
    )
    count_completed_steps(connection, scope.require_training())
