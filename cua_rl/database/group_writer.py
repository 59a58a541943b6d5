"""Writes groups as rows: inserted when their first rollout starts, completed when all members have ended."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean, pstdev
from typing import Any

from sqlalchemy import Connection, Row, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Group, Replay, RolloutRow, Step, TaskRow
from cua_rl.database.rollout_writer import EndedRollout, Parent, cancel_rollouts, complete_rollouts, start_rollouts
from cua_rl.database.rows import (
    Scope,
    SourceRow,
    add_tasks,
    advance_status,
    advance_statuses,
    note_status,
    require_source,
)
from cua_rl.events import GroupEnded, RolloutSource, RolloutStarted
from cua_rl.types.errors import DatabaseError
from cua_rl.types.group_members import without_siblings
from cua_rl.types.rollout import Rollout


def write_rollout_starts(
    connection: Connection, scope: Scope, starts: Sequence[tuple[RolloutStarted, datetime]]
) -> None:
    """Insert running rollouts with their devices, and the groups whose first members they are."""
    # in one order everywhere, so that two workers cannot wait for each other
    starts = sorted(starts, key=lambda start: start[0].group_id)
    task_pks = add_tasks(connection, [event.task for event, _ in starts])
    sources = {source: require_source(connection, scope, source) for source in {event.source for event, _ in starts}}
    known: dict[tuple[RolloutSource, str], int] = {}
    parents: list[Parent] = []
    for (event, at), task_pk in zip(starts, task_pks, strict=True):
        task = {"task_pk": task_pk, "task_id": event.task.task_id, "seed": event.task.seed}
        name = (event.source, event.group_id)
        if name not in known:
            source = sources[event.source]
            known[name] = ensure_group(connection, source, event.group_id, event.group_index, task, at)
        parents.append(Parent(group_pk=known[name], task=task))
    start_rollouts(connection, scope, starts, parents)


def write_group_ends(connection: Connection, scope: Scope, ends: Sequence[tuple[GroupEnded, datetime]]) -> None:
    """Complete groups and their rollouts, with a few statements for all groups of a step or evaluation.

    A member whose start was never reported is inserted now. Replayed rollouts have had their rows since the step that
    sampled them; the group only refers to them.
    """
    of_source: dict[RolloutSource, dict[str, tuple[GroupEnded, datetime]]] = {}
    for event, at in ends:  # one that is reported again counts once
        of_source.setdefault(event.source, {}).setdefault(event.group.group_id, (event, at))
    for source, groups in of_source.items():
        _end_groups(connection, scope, require_source(connection, scope, source), [*groups.values()])


def _end_groups(
    connection: Connection, scope: Scope, source: SourceRow, ends: Sequence[tuple[GroupEnded, datetime]]
) -> None:
    parents = _find_parents(connection, source, ends)
    at = max(at for _, at in ends)
    members = [member for (event, _), parent in zip(ends, parents, strict=True) for member in _members(event, parent)]
    complete_rollouts(connection, scope, members, at)
    figures: dict[int, Mapping[str, object]] = {}
    for (event, ended_at), parent in zip(ends, parents, strict=True):
        group = event.group
        replayed = enumerate(group.replayed, start=len(group.rollouts))
        for position, (index, rollout) in enumerate(replayed):
            credit = {
                "advantage": event.advantages[index] if event.advantages else None,
                "turn_advantages": list(event.of_turns(index)) or None,
            }
            _insert_replay(connection, scope, parent.group_pk, rollout, position=position, credit=credit)
        begun = without_siblings(group)
        num_successes = sum(rollout.success for rollout in begun.rollouts)
        summary = group_figures(begun.rewards, num_successes=num_successes, num_faulty=len(group.faulty))
        figures[parent.group_pk] = {"status": "completed", "ended_at": ended_at, **summary}
    cancel_rollouts(connection, at, RolloutRow.group_pk.in_(figures))
    advanced = set(advance_statuses(connection, Group, figures, at))
    for group_pk in figures.keys() - advanced:  # reported again, or further attempts of an evaluation that went on
        ended = (RolloutRow.group_pk == group_pk, RolloutRow.status.in_(("completed", "failed")))
        stored = connection.execute(select(*MEMBER_COLUMNS).where(*ended)).all()
        mine = (Group.id == group_pk, Group.status == "completed")
        connection.execute(update(Group).where(*mine).values(**stored_figures(stored)))
    for (event, _), parent in zip(ends, parents, strict=True):
        if event.replaced_by is not None and parent.group_pk in advanced:
            # one more group than the source set out to run
            table = source.table
            (added,) = add_tasks(connection, [event.replaced_by])
            connection.execute(
                update(table)
                .where(table.id == source.id)
                .values(num_groups=table.num_groups + 1, task_pks=func.array_append(table.task_pks, added))
            )
    if advanced:
        num_ended, num_groups, task_pks = count_ended_groups(connection, source)
        # the tasks of an asynchronous step, and so its number of groups, are unknown until its batch is taken
        if source.table is Step and task_pks and num_ended >= num_groups:
            advance_status(connection, Step, source.id, "training", at, rollouts_ended_at=at)


def _find_parents(
    connection: Connection, source: SourceRow, ends: Sequence[tuple[GroupEnded, datetime]]
) -> list[Parent]:
    """The row of each group, inserted as running if none of its rollouts has been reported."""
    groups = [event.group for event, _ in ends]
    task_ids = sorted({group.task_id for group in groups})
    tasks = select(TaskRow.id, TaskRow.task_id, TaskRow.seed).where(
        TaskRow.id.in_(source.task_pks), TaskRow.task_id.in_(task_ids)
    )
    task_pks = {(row.task_id, row.seed): row.id for row in connection.execute(tasks)} if source.task_pks else {}
    known = select(Group.group_id, Group.id, Group.task_pk).where(
        source.owns_group, Group.group_id.in_([group.group_id for group in groups])
    )
    rows = connection.execute(known).all()
    keys: dict[str, int] = {row.group_id: row.id for row in rows}
    # tasks of one id and seed may differ in their instructions: the start of a member has named the right one
    started: dict[str, int | None] = {row.group_id: row.task_pk for row in rows}
    parents: list[Parent] = []
    for group, (_, at) in zip(groups, ends, strict=True):
        task_pk = started.get(group.group_id) or task_pks.get((group.task_id, group.seed))
        task = {"task_pk": task_pk, "task_id": group.task_id, "seed": group.seed}
        if group.group_id not in keys:
            keys[group.group_id] = ensure_group(connection, source, group.group_id, group.index, task, at)
        parents.append(Parent(group_pk=keys[group.group_id], task=task))
    return parents


def _members(event: GroupEnded, parent: Parent) -> list[EndedRollout]:
    """Those with a reward and then those without, each kind in its order."""
    advantages = event.advantages or [None] * len(event.group.rollouts)
    return [
        *(
            EndedRollout(
                parent=parent,
                rollout=rollout,
                position=position,
                advantage=advantages[position],
                turn_advantages=event.of_turns(position),
            )
            for position, rollout in enumerate(event.group.rollouts)
        ),
        *(
            EndedRollout(parent=parent, rollout=rollout, position=position, advantage=None)
            for position, rollout in enumerate(event.group.faulty)
        ),
    ]


def ensure_group(
    connection: Connection, source: SourceRow, group_id: str, group_index: int, task: Mapping[str, object], at: datetime
) -> int:
    """The key of a group of a source, inserted as running if it is new."""
    query = select(Group.id).where(source.owns_group, Group.group_id == group_id)
    found = connection.scalar(query)
    if found is not None:
        return found
    named = {"group_id": group_id, "group_index": group_index, "status": "running", "started_at": at}
    statement = insert(Group).values({**source.group_columns, **named, **task})
    inserted = connection.scalar(statement.on_conflict_do_nothing().returning(Group.id))
    if inserted is None:  # another worker has inserted it meanwhile
        return connection.execute(query).scalar_one()
    note_status(connection, Group, inserted, None, "running", at)
    return inserted


def _insert_replay(
    connection: Connection,
    scope: Scope,
    group_pk: int,
    rollout: Rollout,
    *,
    position: int,
    credit: Mapping[str, object],
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
        .values(group_pk=group_pk, rollout_pk=rollout_pk, position=position, **credit)
        .on_conflict_do_nothing(index_elements=["group_pk", "position"])
    )


MEMBER_COLUMNS = (RolloutRow.rollout_id, RolloutRow.parent_id, RolloutRow.reward, RolloutRow.success)


def group_figures(rewards: Sequence[float], *, num_successes: int, num_faulty: int) -> dict[str, object]:
    """Columns that summarise the members of an ended group, without siblings (`types.group_members`)."""
    return {
        "num_rollouts": len(rewards),
        "num_faulty": num_faulty,
        "num_successes": num_successes,
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
    }


def stored_figures(members: Sequence[Row[*tuple[Any, ...]]]) -> dict[str, object]:
    """`group_figures` of rows with `MEMBER_COLUMNS`, of which those without a reward had a fault."""
    rewarded = {member.rollout_id: member for member in members if member.reward is not None}
    begun = [member for member in rewarded.values() if member.parent_id not in rewarded]
    return group_figures(
        [member.reward for member in begun],
        num_successes=sum(member.success is True for member in begun),
        num_faulty=len(members) - len(rewarded),
    )


def count_ended_groups(connection: Connection, source: SourceRow) -> Row[int, int, list[int]]:
    """Set how many groups of a source have ended; returns that number, `num_groups` and `task_pks`."""
    table = source.table
    ended = select(func.count()).select_from(Group).where(source.owns_group, Group.status == "completed")
    statement = update(table).where(table.id == source.id).values(num_ended_groups=ended.scalar_subquery())
    return connection.execute(statement.returning(table.num_ended_groups, table.num_groups, table.task_pks)).one()
