"""Events of runs that other programs send, as rows: reports that arrive piece by piece, again, and in any order.

A report names columns; those that it leaves out keep their values, and whichever report comes first inserts the row. A
status may go back: the sender may repeat a step under its old number. Everything else about rows is as for our own
runs. Blocking.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.group_writer import MEMBER_COLUMNS, count_ended_groups, ensure_group, stored_figures
from cua_rl.database.models import Environment, Eval, Group, RolloutRow, Step, Training, TurnRow, ValidationRow
from cua_rl.database.rollout_writer import ensure_rollouts, insert_judgements, write_validations
from cua_rl.database.rows import Scope, SourceRow, change_row, find_source, insert_row, source_table
from cua_rl.database.turn_writer import count_turns, keep_costs, keep_extremes
from cua_rl.database.writer import count_completed_steps, write_batch, write_training_start
from cua_rl.events import BatchTaken, RolloutSource, TrainingStarted
from cua_rl.types.judgement import Judgement, Validation

Columns = Mapping[str, Any]
# the images before and after a turn, and those that its request names
_INSERT_SHOWN = text("""
INSERT INTO rollout_images (rollout_pk, sha256)
SELECT DISTINCT turns.rollout_pk, screenshots.sha256
FROM turns CROSS JOIN LATERAL (
    SELECT before_sha256 UNION ALL SELECT after_sha256
    UNION ALL SELECT substr(named #>> '{}', 8)
    FROM jsonb_path_query(request, '$.** ? (@.type() == "string" && @ starts with "sha256:")') AS named
) AS shown (sha256) JOIN screenshots ON screenshots.sha256 = shown.sha256
WHERE turns.id = :key ON CONFLICT DO NOTHING
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """A run, by its name and folder; with a new `attempt_id` it resumed."""

    run_name: str
    log_path: str
    attempt_id: UUID | None
    """None if the sender does not distinguish attempts."""
    image_token_id: int
    first_step: int
    kept_group_ids: tuple[str, ...]
    started_at: datetime | None
    settings: Columns
    """Added to those that earlier reports named."""
    columns: Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """A step or an evaluation."""

    training_id: int
    source: RolloutSource
    columns: Columns
    group_ids: tuple[str, ...] | None = None
    """The groups that an asynchronous step trains, once its batch has been taken."""


def write_device(connection: Connection, rollout_pk: int, columns: Columns) -> int:
    """The device that a rollout uses."""
    statement = insert(Environment).values(rollout_pk=rollout_pk, **columns)
    statement = statement.on_conflict_do_update(index_elements=["rollout_pk"], set_=dict(columns))
    row_id = connection.execute(statement.returning(Environment.id)).scalar_one()
    nameless = update(RolloutRow).where(RolloutRow.id == rollout_pk, RolloutRow.device_id.is_(None))
    connection.execute(nameless.values(device_id=columns["device_id"]))
    keep_costs(connection, [rollout_pk])
    return row_id


def write_validation(connection: Connection, rollout_pk: int, validation: Validation) -> int:
    """A validator's result."""
    write_validations(connection, {rollout_pk: validation})
    return connection.execute(select(ValidationRow.id).where(ValidationRow.rollout_pk == rollout_pk)).scalar_one()


def write_training(connection: Connection, report: TrainingReport, at: datetime) -> int:
    """Insert or update a run."""
    found = connection.execute(
        select(Training.id, Training.attempt_id, Training.config, Training.total_steps).where(
            Training.run_name == report.run_name, Training.log_path == report.log_path
        )
    ).one_or_none()
    config: dict[str, Any] = {**(found.config if found else {}), **report.settings}
    columns: dict[str, Any] = {**report.columns, "config": config, "heartbeat_at": at}
    if found is not None and report.attempt_id in (None, found.attempt_id):
        training_id = found.id
    else:
        started = TrainingStarted(
            run_name=report.run_name,
            log_path=report.log_path,
            config=config,
            first_step=report.first_step,
            total_steps=report.columns.get("total_steps", found.total_steps if found else 0),
            kept_group_ids=report.kept_group_ids,
        )
        scope = Scope(image_token_id=report.image_token_id, attempt_id=report.attempt_id or uuid4())
        training_id = write_training_start(connection, scope, started, report.started_at or at).require_training()
        if found is not None:
            columns.pop("num_completed_steps", None)  # just counted: not all steps of the run may have arrived
    change_row(connection, Training, training_id, columns, at)
    return training_id


def write_source(connection: Connection, report: SourceReport, at: datetime) -> int:
    """Insert or update a step or an evaluation."""
    table, columns = source_table(report.source), dict(report.columns)
    found = find_source(connection, report.training_id, report.source)
    if found is None:
        attempt = select(Training.attempt_id).where(Training.id == report.training_id)
        defaults: dict[str, Any] = {
            "training_id": report.training_id,
            "step": report.source.step,
            "attempt_id": connection.execute(attempt).scalar_one(),
            "status": "rollouts" if table is Step else "running",
            "policy_version": report.source.step,
            "group_size": 1,
            "num_groups": 0,
            "task_pks": [],
            "started_at": at,
        }
        if table is Eval:
            defaults["phase"] = report.source.phase
        row_id = insert_row(connection, table, defaults | columns, at)
    else:
        row_id = found.id
        if "metrics" in columns:
            known = connection.scalar(select(table.metrics).where(table.id == row_id))
            columns["metrics"] = {**(known or {}), **columns["metrics"]}
        change_row(connection, table, row_id, columns, at)
    if report.group_ids is not None:
        # move groups to the step that trains them; a group of which nothing arrived is left out
        arrived = select(Group.group_id).where(
            Group.training_id == report.training_id, Group.step_id.is_not(None), Group.group_id.in_(report.group_ids)
        )
        stored = tuple(connection.scalars(arrived))
        scope = Scope(image_token_id=0, training_id=report.training_id)
        write_batch(connection, scope, BatchTaken(step=report.source.step, group_ids=stored), at)
    if table is Step and columns.get("status") == "completed":
        count_completed_steps(connection, report.training_id)
        connection.execute(update(Training).where(Training.id == report.training_id).values(heartbeat_at=at))
    return row_id


def write_rollout(
    connection: Connection,
    source: SourceRow,
    at: datetime,
    *,
    rollout_id: str,
    group_id: str,
    group_index: int,
    member_index: int,
    task: Columns,
    columns: Columns,
    judgement: Judgement | None,
) -> int:
    """A rollout, and with it the group that it belongs to; `task` is its task_pk, task_id and seed."""
    query = select(RolloutRow.id, RolloutRow.group_pk).where(
        RolloutRow.training_id == source.training_id, RolloutRow.rollout_id == rollout_id
    )
    found = connection.execute(query).one_or_none()
    if found is None:
        started_at = columns.get("started_at", at)
        group_pk = ensure_group(connection, source, group_id, group_index, task, started_at)
        place = {"rollout_id": rollout_id, "group_index": group_index, "member_index": member_index}
        new = {"group_pk": group_pk, **task, **place, "started_at": started_at}
        row_id = ensure_rollouts(connection, source.training_id, [new])[rollout_id]
    else:
        row_id, group_pk = found
    change_row(connection, RolloutRow, row_id, columns, at)
    if judgement is not None:
        insert_judgements(connection, {row_id: judgement})
    keep_costs(connection, [row_id])
    _update_group(connection, source, group_pk, at)
    return row_id


def _update_group(connection: Connection, source: SourceRow, group_pk: int, at: datetime) -> None:
    """End the group with its last member, or reopen it with a new one; its source counts groups that have ended."""
    query = select(RolloutRow.status, RolloutRow.position, *MEMBER_COLUMNS).where(RolloutRow.group_pk == group_pk)
    members = connection.execute(query).all()
    columns: dict[str, object] = {"status": "running", "ended_at": None}
    # our own sender gives places when the group has ended, which may have begun with fewer members (branches)
    is_whole = len(members) >= source.group_size or all(member.position is not None for member in members)
    if is_whole and all(member.status != "running" for member in members):
        columns = {"status": "completed", "ended_at": at, **stored_figures(members)}
    if change_row(connection, Group, group_pk, columns, at):
        table = source.table
        known = select(func.count()).select_from(Group).where(source.owns_group).scalar_subquery()
        num_groups = func.greatest(table.num_groups, known)
        connection.execute(update(table).where(table.id == source.id).values(num_groups=num_groups))
        count_ended_groups(connection, source)


def write_turn(
    connection: Connection, rollout_pk: int, turn_index: int, columns: Columns, at: datetime, *, response_id: str
) -> int:
    """A turn of a rollout; `response_id` names it if no column does."""
    query = select(TurnRow.id).where(TurnRow.rollout_pk == rollout_pk, TurnRow.turn_index == turn_index)
    row_id = connection.scalar(query)
    if row_id is None:
        started_at = columns.get("started_at", at)
        # the version with which the rollout's step or evaluation began
        begun = (
            select(func.coalesce(Step.policy_version, Eval.policy_version))
            .select_from(RolloutRow)
            .join(Group, Group.id == RolloutRow.group_pk)
            .outerjoin(Step, Step.id == Group.step_id)
            .outerjoin(Eval, Eval.id == Group.eval_id)
            .where(RolloutRow.id == rollout_pk)
        )
        defaults: dict[str, Any] = {
            "rollout_pk": rollout_pk,
            "turn_index": turn_index,
            "response_id": response_id,
            "prompt_token_ids": [],
            "prompt_chunks": [],
            "sampled_tokens": [],
            "sampling_logprobs": [],
            "policy_version": connection.scalar(begun) or 0,
            "stop": "stop",
            "text": "",
            "prompt_matches_renderer": True,
            "request": {},
            "cached_tokens": 0,
            "started_at": started_at,
            "started_unix_s": started_at.timestamp(),
            "duration_s": 0.0,
            "durations_s": {},
        }
        statement = insert(TurnRow).values(defaults | {**columns}).returning(TurnRow.id)
        row_id = connection.execute(statement).scalar_one()
        _keep_shown(connection, row_id, columns)
    else:
        change_turn(connection, row_id, columns)
    count_turns(connection, {rollout_pk: turn_index + 1})
    return row_id


def change_turn(connection: Connection, row_id: int, columns: Columns) -> int:
    """Something more about a turn that was reported before."""
    if columns:
        connection.execute(update(TurnRow).where(TurnRow.id == row_id).values(dict(columns)))
        _keep_shown(connection, row_id, columns)
    return row_id


def _keep_shown(connection: Connection, row_id: int, columns: Columns) -> None:
    """What rollouts keep of their turns: the images, the extremes of the tokens, and what they cost."""
    connection.execute(_INSERT_SHOWN, {"key": row_id})
    keys = connection.scalars(select(TurnRow.rollout_pk).where(TurnRow.id == row_id)).all()
    if "training_logprobs" in columns:
        keep_extremes(connection, keys)
    keep_costs(connection, keys)
