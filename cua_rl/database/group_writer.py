"""Groups as rows: there from the start of their first rollout, complete when all members have ended."""

from collections.abc import Sequence
from datetime import datetime
from statistics import fmean, pstdev
from typing import Any

from sqlalchemy import Connection, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Group, Replay, RolloutRow, Step, TaskRow
from cua_rl.database.rollout_writer import EndedRollout, Parent, cancel_rollouts, complete_rollouts, start_rollouts
from cua_rl.database.rows import (
    Scope,
    add_tasks,
    advance_status,
    note_status,
    require_source,
    source_table,
)
from cua_rl.errors import DatabaseError
from cua_rl.events import GroupEnded, RolloutSource, RolloutStarted
from cua_rl.tasks.task import Task
from cua_rl.types import Rollout, RolloutGroup


def write_rollout_starts(
    connection: Connection, scope: Scope, starts: Sequence[tuple[RolloutStarted, datetime]]
) -> None:
    """Insert running rollouts with their devices, and the groups whose first members they are."""
    task_pks = add_tasks(connection, [event.task for event, _ in starts])
    sources = {source: require_source(connection, scope, source).id for source in {event.source for event, _ in starts}}
    group_pks: dict[tuple[RolloutSource, str], int] = {}
    parents: list[Parent] = []
    for (event, at), task_pk in zip(starts, task_pks, strict=True):
        group = (event.source, event.group_id)
        task = {"task_pk": task_pk, "task_id": event.task.task_id, "seed": event.task.seed}
        if group not in group_pks:
            group_pks[group] = _ensure_group(
                connection,
                scope,
                event.source,
                sources[event.source],
                event.group_id,
                event.group_index,
                task,
                at,
            )
        parents.append(Parent(group_pk=group_pks[group], task=task))
    start_rollouts(connection, scope, starts, parents)


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
    ended = [
        EndedRollout(rollout=rollout, position=position, advantage=advantage)
        for position, (rollout, advantage) in enumerate(zip(group.rollouts, advantages[:num_members], strict=True))
    ]
    ended += [
        EndedRollout(rollout=rollout, position=position, advantage=None)
        for position, rollout in enumerate(group.faulty)
    ]
    complete_rollouts(connection, scope, Parent(group_pk=group_pk, task=task), ended, at)
    for position, (rollout, advantage) in enumerate(zip(group.replayed, advantages[num_members:], strict=True)):
        _insert_replay(connection, scope, group_pk, rollout, position=position, advantage=advantage)
    cancel_rollouts(connection, at, group_pk=group_pk)
    if advance_status(connection, Group, group_pk, "completed", at, ended_at=at, **_statistics(group)):
        if event.replaced_by is not None:
            _add_group(connection, event.source, source.id, event.replaced_by)
        _count_ended_group(connection, event.source, source.id, at)


def _ensure_group(
    connection: Connection,
    scope: Scope,
    source: RolloutSource,
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


def _statistics(group: RolloutGroup) -> dict[str, object]:
    rewards = group.rewards
    return {
        "num_rollouts": len(group.rollouts),
        "num_faulty": len(group.faulty),
        "num_successes": sum(rollout.success for rollout in group.rollouts),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
    }


def _add_group(connection: Connection, source: RolloutSource, source_id: int, task: Task) -> None:
    """One more group than the source set out to run."""
    table = source_table(source)
    (task_pk,) = add_tasks(connection, [task])
    connection.execute(
        update(table)
        .where(table.id == source_id)
        .values(num_groups=table.num_groups + 1, task_pks=func.array_append(table.task_pks, task_pk))
    )


def _count_ended_group(connection: Connection, source: RolloutSource, source_id: int, at: datetime) -> None:
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
