"""Shared by all writers: the scope of a run, status changes, steps, evaluations and tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from json import dumps
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Connection, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql

from cua_rl.database.columns import escape_text
from cua_rl.database.models import Eval, Group, RolloutRow, StatusChange, Step, TaskRow, Training
from cua_rl.events import RolloutSource
from cua_rl.tasks.task import Task
from cua_rl.types.errors import DatabaseError

Table = type[Training] | type[Step] | type[Eval] | type[Group] | type[RolloutRow]

_SUBJECT_COLUMNS: dict[Table, str] = {
    Training: "training_id",
    Step: "step_id",
    Eval: "eval_id",
    Group: "group_pk",
    RolloutRow: "rollout_pk",
}
_RANKS = {"rollouts": 0, "running": 0, "training": 1, "completed": 2, "failed": 2, "cancelled": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The attempt whose rows are written; its training is known once `TrainingStarted` is written."""

    image_token_id: int
    attempt_id: UUID = field(default_factory=uuid4)
    training_id: int | None = None

    def require_training(self) -> int:
        """The training's id; raises `DatabaseError` if none has started."""
        if self.training_id is None:
            raise DatabaseError("expected TrainingStarted before any other event; report it first")
        return self.training_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """The step or evaluation that rollouts belong to."""

    table: type[Step] | type[Eval]
    id: int
    training_id: int
    attempt_id: UUID
    group_size: int
    task_pks: list[int]

    @property
    def group_columns(self) -> dict[str, object]:
        """Columns of a group that make it part of this source."""
        return {"training_id": self.training_id, "step_id" if self.table is Step else "eval_id": self.id}

    @property
    def owns_group(self) -> ColumnElement[bool]:
        """True for groups of this source."""
        return Group.step_id == self.id if self.table is Step else Group.eval_id == self.id


def note_status(
    connection: Connection, table: Table, row_id: int, old_status: str | None, new_status: str, at: datetime
) -> None:
    subject = {_SUBJECT_COLUMNS[table]: row_id}
    connection.execute(
        insert(StatusChange).values(old_status=old_status, new_status=new_status, changed_at=at, **subject)
    )


def insert_row(connection: Connection, table: Table, columns: Mapping[str, object], at: datetime) -> int:
    """Insert a row that has a status, and the first line of its status history; returns its key."""
    row_id = connection.execute(insert(table).values(columns).returning(table.id)).scalar_one()
    note_status(connection, table, row_id, None, str(columns["status"]), at)
    return row_id


def change_row(connection: Connection, table: Table, row_id: int, columns: Mapping[str, object], at: datetime) -> bool:
    """Set columns of a row, and note a change of status in whichever direction; returns whether there was one."""
    has_changed = False
    if "status" in columns:
        old = connection.execute(select(table.status).where(table.id == row_id).with_for_update()).scalar_one()
        has_changed = old != columns["status"]
        if has_changed:
            note_status(connection, table, row_id, old, str(columns["status"]), at)
    if columns:
        connection.execute(update(table).where(table.id == row_id).values(columns))
    return has_changed


def note_restart(
    connection: Connection, training_id: int, old_status: str, last_seen_at: datetime, at: datetime
) -> None:
    """Note that a run resumed. A killed one still counts as running: it was interrupted at its last heartbeat."""
    if old_status == "running":
        note_status(connection, Training, training_id, "running", "interrupted", last_seen_at)
        old_status = "interrupted"
    note_status(connection, Training, training_id, old_status, "running", at)


def advance_status(
    connection: Connection, table: Table, row_id: int, new_status: str, at: datetime, **values: object
) -> bool:
    """Advance a row to `new_status` and set `values`; returns False without a change if it is there or beyond."""
    return bool(advance_statuses(connection, table, {row_id: {"status": new_status, **values}}, at))


def advance_statuses(
    connection: Connection, table: Table, changes: Mapping[int, Mapping[str, object]], at: datetime
) -> list[int]:
    """Advance rows, each by its key to a new `status` and other values with the same names; rows that are there or
    beyond stay as they are. Takes a few statements for all of them; returns the keys of the rows that advanced.
    """
    query = select(table.id, table.status).where(table.id.in_(changes)).order_by(table.id).with_for_update()
    old = {row.id: row.status for row in connection.execute(query)}
    ahead = {key: change for key, change in changes.items() if _RANKS[str(change["status"])] > _RANKS[old[key]]}
    if not ahead:
        return []
    connection.execute(
        update(table).where(table.id == bindparam("row_key")),
        [{"row_key": key, **change} for key, change in ahead.items()],
    )
    subject = _SUBJECT_COLUMNS[table]
    connection.execute(
        insert(StatusChange),
        [
            {"old_status": old[key], "new_status": change["status"], "changed_at": at, subject: key}
            for key, change in ahead.items()
        ],
    )
    return list(ahead)


def source_table(source: RolloutSource) -> type[Step] | type[Eval]:
    """Steps and evaluations have a table each."""
    return Step if source.phase == "step" else Eval


def find_source(connection: Connection, training_id: int, source: RolloutSource) -> SourceRow | None:
    """The row of a step or evaluation; None if it has not started."""
    table = source_table(source)
    conditions = [table.training_id == training_id, table.step == source.step]
    if table is Eval:
        conditions.append(Eval.phase == source.phase)
    return _select_source(connection, table, conditions)


def find_source_by_key(connection: Connection, table: type[Step] | type[Eval], row_id: int) -> SourceRow | None:
    """The row of a step or evaluation by its key; None if it was deleted."""
    return _select_source(connection, table, [table.id == row_id])


def _select_source(
    connection: Connection, table: type[Step] | type[Eval], conditions: Sequence[ColumnElement[bool]]
) -> SourceRow | None:
    columns = select(table.id, table.training_id, table.attempt_id, table.group_size, table.task_pks)
    row = connection.execute(columns.where(*conditions)).one_or_none()
    # a public method of SQLAlchemy, in spite of its name
    return None if row is None else SourceRow(table=table, **row._asdict())  # pyright: ignore[reportPrivateUsage]


def require_source(connection: Connection, scope: Scope, source: RolloutSource) -> SourceRow:
    """`find_source`, or `DatabaseError` if it has not started."""
    found = find_source(connection, scope.require_training(), source)
    if found is None:
        raise DatabaseError(
            f"expected {source.phase} {source.step} to have started, got no row; report SourceStarted first"
        )
    return found


def add_tasks(connection: Connection, tasks: Sequence[Task]) -> list[int]:
    """Keys of task instances in the order given; new ones are inserted."""
    definitions = [_task_values(task) for task in tasks]
    digests = [values["definition_sha256"] for values in definitions]
    query = select(TaskRow.definition_sha256, TaskRow.id).where(TaskRow.definition_sha256.in_(sorted(set(digests))))
    keys = {row.definition_sha256: row.id for row in connection.execute(query)}
    missing = {digest: values for digest, values in zip(digests, definitions, strict=True) if digest not in keys}
    if missing:  # in one order everywhere, so that two runs cannot wait for each other
        statement = postgresql.insert(TaskRow).on_conflict_do_nothing()
        connection.execute(statement, [missing[digest] for digest in sorted(missing)])
        keys = {row.definition_sha256: row.id for row in connection.execute(query)}
    return [keys[digest] for digest in digests]


def _task_values(task: Task) -> dict[str, Any]:
    values: dict[str, Any] = {
        "task_id": task.task_id,
        "seed": task.seed,
        "instruction": task.instruction,
        "category": task.category,
        "difficulty": task.difficulty,
        "max_turns": task.max_turns,
        "tags": [escape_text(tag) for tag in task.tags],
    }
    return values | {"definition_sha256": sha256(dumps(values, sort_keys=True).encode()).hexdigest()}
