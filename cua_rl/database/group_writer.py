"""Rollouts and groups as rows: what is known when a rollout starts, and the rest when its group ends."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import fmean, pstdev
from typing import Any

from sqlalchemy import Connection, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Environment, Group, Replay, RolloutRow, Step, TaskRow, TurnRow, ValidationRow
from cua_rl.database.rows import Scope, add_tasks, advance_status, note_status, require_source, source_table
from cua_rl.database.turn_writer import insert_turns
from cua_rl.errors import DatabaseError
from cua_rl.events import GroupEnded, RolloutStarted, Source
from cua_rl.tasks.task import Task
from cua_rl.types import Rollout, RolloutGroup, StopReason


def write_rollout_start(connection: Connection, scope: Scope, event: RolloutStarted, at: datetime) -> None:
    """Insert a running rollout with its device, and its group if it is the first member."""
    source = require_source(connection, scope, event.source)
    task_pk = add_tasks(connection, [event.task])[0]
    task = {"task_pk": task_pk, "task_id": event.task.task_id, "seed": event.task.seed}
    group_pk = _ensure_group(connection, scope, event.source, source.id, event.group_id, event.group_index, task, at)
    values = task | {
        "rollout_id": event.rollout_id,
        "group_index": event.group_index,
        "member_index": event.member_index,
        "device_id": event.device_id,
        "max_turns": event.max_turns,
        "started_at": at,
    }
    rollout_pk = _ensure_rollout(connection, scope, group_pk, values, at)
    connection.execute(
        insert(Environment)
        .values(rollout_pk=rollout_pk, device_id=event.device_id, status="running", started_at=at)
        .on_conflict_do_nothing(index_elements=["rollout_pk"])
    )


def write_group_end(connection: Connection, scope: Scope, event: GroupEnded, at: datetime) -> None:
    """Complete a group and its rollouts; a member whose start was never reported is inserted now.

    Replayed rollouts have their rows since the step that sampled them; the group only refers to them.
    """
    group, source = event.group, require_source(connection, scope, event.source)
    task_pk = connection.scalar(
        select(TaskRow.id)
        .where(TaskRow.id.in_(source.task_pks), TaskRow.task_id == group.task_id, TaskRow.seed == group.seed)
        .limit(1)
    )
    task = {"task_pk": task_pk, "task_id": group.task_id, "seed": group.seed}
    group_pk = _ensure_group(connection, scope, event.source, source.id, group.group_id, group.index, task, at)
    advantages: Sequence[float | None] = event.advantages or [None] * len(group.compared)
    num_members = len(group.rollouts)
    for position, (rollout, advantage) in enumerate(zip(group.rollouts, advantages[:num_members], strict=True)):
        _complete_rollout(connection, scope, group_pk, task_pk, rollout, at, position=position, advantage=advantage)
    for position, rollout in enumerate(group.faulty):
        _complete_rollout(connection, scope, group_pk, task_pk, rollout, at, position=position, advantage=None)
    for position, (rollout, advantage) in enumerate(zip(group.replayed, advantages[num_members:], strict=True)):
        _insert_replay(connection, scope, group_pk, rollout, position=position, advantage=advantage)
    cancel_running_rollouts(connection, at, group_pk=group_pk)
    if advance_status(connection, Group, group_pk, "completed", at, ended_at=at, **_statistics(group)):
        if event.replaced_by is not None:
            _add_group(connection, event.source, source.id, event.replaced_by)
        _count_ended_group(connection, event.source, source.id, at)


def cancel_running_rollouts(
    connection: Connection, at: datetime, *, group_pk: int | None = None, training_id: int | None = None
) -> None:
    """Cancel what still runs in a group, or in a training: nobody will report its end."""
    scope = RolloutRow.group_pk == group_pk if group_pk is not None else RolloutRow.training_id == training_id
    for rollout_pk in connection.scalars(select(RolloutRow.id).where(scope, RolloutRow.status == "running")).all():
        advance_status(connection, RolloutRow, rollout_pk, "cancelled", at, ended_at=at)
        _release_device(connection, rollout_pk, "released", None, at)


def _ensure_group(
    connection: Connection,
    scope: Scope,
    source: Source,
    source_id: int,
    group_id: str,
    group_index: int,
    task: dict[str, Any],
    at: datetime,
) -> int:
    table = source_table(source)
    parent = {"step_id" if table is Step else "eval_id": source_id}
    mine = and_(Group.group_id == group_id, Group.step_id == source_id if table is Step else Group.eval_id == source_id)
    found = connection.scalar(select(Group.id).where(mine))
    if found is not None:
        return found
    inserted = connection.scalars(
        insert(Group)
        .values(
            training_id=scope.training_id,
            group_id=group_id,
            group_index=group_index,
            status="running",
            started_at=at,
            **parent,
            **task,
        )
        .returning(Group.id)
    ).one()
    note_status(connection, Group, inserted, None, "running", at)
    return inserted


def _ensure_rollout(connection: Connection, scope: Scope, group_pk: int, values: dict[str, Any], at: datetime) -> int:
    statement = insert(RolloutRow).values(training_id=scope.training_id, group_pk=group_pk, status="running", **values)
    unique = ["training_id", "rollout_id"]
    inserted = connection.scalar(statement.on_conflict_do_nothing(index_elements=unique).returning(RolloutRow.id))
    if inserted is not None:
        note_status(connection, RolloutRow, inserted, None, "running", at)
        return inserted
    found = connection.execute(
        select(RolloutRow.id, RolloutRow.group_pk).where(
            RolloutRow.training_id == scope.training_id, RolloutRow.rollout_id == values["rollout_id"]
        )
    ).one()
    if found.group_pk != group_pk:
        raise DatabaseError(
            f"expected rollout ids to be unique in a training, got {values['rollout_id']!r} in two groups; "
            "make a new id for every attempt"
        )
    return found.id


def _complete_rollout(
    connection: Connection,
    scope: Scope,
    group_pk: int,
    task_pk: int | None,
    rollout: Rollout,
    at: datetime,
    *,
    position: int,
    advantage: float | None,
) -> None:
    values = _rollout_start_values(rollout, task_pk)
    rollout_pk = _ensure_rollout(connection, scope, group_pk, values, at)
    _insert_missing_turns(connection, scope, rollout_pk, rollout)
    _insert_validation(connection, rollout_pk, rollout)
    status = "failed" if rollout.stop_reason.is_fault else "completed"
    reward = rollout.reward
    advance_status(
        connection,
        RolloutRow,
        rollout_pk,
        status,
        at,
        device_id=rollout.device_id,
        position=position,
        num_turns=len(rollout.turns),
        stop_reason=rollout.stop_reason.value,
        answer=rollout.answer,
        error=rollout.error,
        success=rollout.success,
        reward=None if reward is None else reward.total,
        reward_parts=None if reward is None else reward.parts,
        advantage=advantage,
        started_at=values["started_at"],
        started_unix_s=rollout.started_at,
        duration_s=rollout.duration_s,
        ended_at=values["started_at"] + timedelta(seconds=rollout.duration_s),
    )
    broken = rollout.stop_reason is StopReason.DEVICE_ERROR
    _release_device(connection, rollout_pk, "failed" if broken else "released", rollout.error if broken else None, at)


def _rollout_start_values(rollout: Rollout, task_pk: int | None) -> dict[str, Any]:
    return {
        "task_pk": task_pk,
        "task_id": rollout.task_id,
        "seed": rollout.seed,
        "rollout_id": rollout.rollout_id,
        "group_index": rollout.group_index,
        "member_index": rollout.member_index,
        "device_id": rollout.device_id,
        "started_at": datetime.fromtimestamp(rollout.started_at, UTC),
    }


def _insert_replay(
    connection: Connection, scope: Scope, group_pk: int, rollout: Rollout, *, position: int, advantage: float | None
) -> None:
    rollout_pk = connection.scalar(
        select(RolloutRow.id).where(
            RolloutRow.training_id == scope.training_id, RolloutRow.rollout_id == rollout.rollout_id
        )
    )
    if rollout_pk is None:
        raise DatabaseError(f"expected replayed rollout {rollout.rollout_id!r} of an earlier step, got no such row")
    connection.execute(
        insert(Replay)
        .values(group_pk=group_pk, rollout_pk=rollout_pk, position=position, advantage=advantage)
        .on_conflict_do_nothing(index_elements=["group_pk", "position"])
    )


def _insert_missing_turns(connection: Connection, scope: Scope, rollout_pk: int, rollout: Rollout) -> None:
    stored = set(connection.scalars(select(TurnRow.turn_index).where(TurnRow.rollout_pk == rollout_pk)))
    missing = [(rollout_pk, turn) for turn in rollout.turns if turn.index not in stored]
    insert_turns(connection, scope, missing)


def _insert_validation(connection: Connection, rollout_pk: int, rollout: Rollout) -> None:
    validation = rollout.validation
    if validation is not None:
        connection.execute(
            insert(ValidationRow)
            .values(
                rollout_pk=rollout_pk,
                query=validation.query,
                expected=validation.expected,
                actual=validation.actual,
                success=validation.success,
                duration_s=validation.duration_s,
            )
            .on_conflict_do_nothing(index_elements=["rollout_pk"])
        )


def _release_device(connection: Connection, rollout_pk: int, status: str, error: str | None, at: datetime) -> None:
    connection.execute(
        update(Environment)
        .where(Environment.rollout_pk == rollout_pk, Environment.status == "running")
        .values(status=status, error=error, ended_at=at)
    )


def _statistics(group: RolloutGroup) -> dict[str, object]:
    rewards = group.rewards
    return {
        "num_rollouts": len(group.rollouts),
        "num_faulty": len(group.faulty),
        "num_successes": sum(rollout.success for rollout in group.rollouts),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
    }


def _add_group(connection: Connection, source: Source, source_id: int, task: Task) -> None:
    """One more group than the source set out to run."""
    table = source_table(source)
    (task_pk,) = add_tasks(connection, [task])
    connection.execute(
        update(table)
        .where(table.id == source_id)
        .values(num_groups=table.num_groups + 1, task_pks=func.array_append(table.task_pks, task_pk))
    )


def _count_ended_group(connection: Connection, source: Source, source_id: int, at: datetime) -> None:
    """Count it; the last of a step that knows its tasks takes it from rollouts to training.

    The groups of an asynchronous step are not known before its batch is taken.
    """
    table = source_table(source)
    mine = Group.step_id == source_id if table is Step else Group.eval_id == source_id
    ended = select(func.count()).select_from(Group).where(mine, Group.status == "completed").scalar_subquery()
    statement = update(table).where(table.id == source_id).values(num_ended_groups=ended)
    counts = connection.execute(statement.returning(table.num_ended_groups, table.num_groups, table.task_pks)).one()
    if table is Step and counts.task_pks and counts.num_ended_groups >= counts.num_groups:
        advance_status(connection, Step, source_id, "training", at, rollouts_ended_at=at)
