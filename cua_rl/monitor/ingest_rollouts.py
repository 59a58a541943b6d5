"""Rollouts that are sent, as rows: with the group that they imply and the device that they used."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Integer, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Environment, Eval, Group, RolloutRow, Step, TaskRow
from cua_rl.database.monitor_models import IngestItem
from cua_rl.database.rollout_writer import insert_judgements
from cua_rl.database.rows import note_status
from cua_rl.judgement import Judgement
from cua_rl.monitor import ingest_schemas as sent
from cua_rl.monitor.ingest_scope import IngestScope, ItemRefused
from cua_rl.types import StopReason

_JUDGEMENT = TypeAdapter(Judgement)
_STATUS = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}
_EXACT = ("advantage", "stop_reason", "reward_parts", "started_unix_s", "duration_s", "answer", "seed", "position")


def as_object(value: Any) -> dict[str, Any]:
    """A JSON object; empty if it is something else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def environment_values(item: sent.SentEnvironment) -> dict[str, Any]:
    """Columns of the device that a rollout used."""
    status = {"terminated": "released", "error": "failed", "failed": "failed"}.get(item.status or "", "running")
    return {
        "device_id": item.gbox_id or item.box_type or item.env_type or "unknown",
        "status": status,
        "error": item.error_message,
        "started_at": item.creation_time or item.start_time or item.created_at or now(),
        "ended_at": item.termination_time or item.end_time,
    }


def store_rollout(scope: IngestScope, item: sent.SentRollout) -> int:
    """Insert or update a rollout; its group, device and parent's counts follow."""
    parent = _find_parent(scope, item)
    task = _find_task(scope, item)
    values = _values(item)
    query = select(RolloutRow.id, RolloutRow.status, RolloutRow.group_pk).where(
        RolloutRow.training_id == parent.training_id, RolloutRow.rollout_id == item.rollout_id
    )
    row = scope.connection.execute(query).one_or_none()
    group_pk = _ensure_group(scope, parent, item, task) if row is None else row.group_pk
    if row is None:
        row_id = _insert(scope, parent, group_pk, task, item, values)
    else:
        row_id = row.id
        if values:
            scope.connection.execute(update(RolloutRow).where(RolloutRow.id == row_id).values(**values))
        if values.get("status", row.status) != row.status:
            note_status(scope.connection, RolloutRow, row_id, row.status, values["status"], now())
    if item.env_id is not None:
        _use_environment(scope, item.env_id, row_id)
    if item.cua_rl.get("judgement") is not None:
        insert_judgements(scope.connection, {row_id: _judgement(item.cua_rl["judgement"])})
    _count(scope, group_pk, parent)
    return row_id


def _judgement(sent_judgement: object) -> Judgement:
    """What a judge said, as it was sent; a prompt is known by its hash, so the hash must be its own."""
    try:
        judgement = _JUDGEMENT.validate_python(sent_judgement)
    except ValidationError as error:
        raise ItemRefused(f"expected a judgement with its votes, got {error.error_count()} mistakes in it") from None
    if judgement.prompt_sha256 != sha256(judgement.prompt.encode("utf-8", "surrogatepass")).hexdigest():
        raise ItemRefused("expected prompt_sha256 to be the hash of the judgement's prompt, got another")
    return judgement


def _find_parent(scope: IngestScope, item: sent.SentRollout) -> Step | Eval:
    """The step or evaluation that the rollout says it belongs to."""
    given = {"steps": item.step_id, "evals": item.eval_id, "baselines": item.baseline_id}
    if item.source_type is not None:
        wanted = f"{item.source_type}s"
        given = {kind: key for kind, key in given.items() if kind == wanted}
    kind, key = next(((kind, key) for kind, key in given.items() if key is not None), (None, None))
    if kind is None or key is None:
        raise ItemRefused("expected one of step_id, eval_id and baseline_id, that of the source_type, got none")
    row_id = scope.require_row(kind, key)
    table = Step if kind == "steps" else Eval
    columns = select(table.id, table.training_id, table.group_size).where(table.id == row_id)
    row = scope.connection.execute(columns).one_or_none()
    if row is None:
        raise ItemRefused(f"expected a parent that is still there, got {kind} {key}; send it again")
    return table(id=row.id, training_id=row.training_id, group_size=row.group_size)


def _find_task(scope: IngestScope, item: sent.SentRollout) -> Any:
    if item.task_id is None:
        return None
    query = select(TaskRow.id, TaskRow.task_id, TaskRow.seed, TaskRow.max_turns)
    return scope.connection.execute(query.where(TaskRow.id == scope.require_row("tasks", item.task_id))).one_or_none()


def _ensure_group(scope: IngestScope, parent: Step | Eval, item: sent.SentRollout, task: Any) -> int:
    number = item.group_num or 0
    group_id = str(item.cua_rl.get("group_id") or f"group-{number}")[:200]
    mine = Group.step_id == parent.id if isinstance(parent, Step) else Group.eval_id == parent.id
    found = scope.connection.scalar(select(Group.id).where(mine, Group.group_id == group_id))
    if found is not None:
        return found
    started = item.start_time or now()
    statement = insert(Group).values(
        training_id=parent.training_id,
        step_id=parent.id if isinstance(parent, Step) else None,
        eval_id=parent.id if isinstance(parent, Eval) else None,
        group_id=group_id,
        group_index=number,
        task_pk=None if task is None else task.id,
        task_id="unknown" if task is None else task.task_id,
        seed=_seed(item, task),
        status="running",
        started_at=started,
    )
    group_pk = scope.connection.execute(statement.returning(Group.id)).scalar_one()
    note_status(scope.connection, Group, group_pk, None, "running", started)
    return group_pk


def _seed(item: sent.SentRollout, task: Any) -> int:
    return int(item.cua_rl.get("seed", 0 if task is None else task.seed))


def _values(item: sent.SentRollout) -> dict[str, Any]:
    """What this update says; what it leaves out stays as it is."""
    success = item.task_success if item.task_success is not None else item.validation_passed
    num_turns = item.num_turns if item.num_turns is not None else item.current_turn
    summary = as_object(item.summary_json)
    if success is None and isinstance(summary.get("task_success"), bool):
        success = summary["task_success"]
    found: dict[str, Any] = {
        "max_turns": item.max_turns,
        "num_turns": None if num_turns is None else max(0, num_turns),
        "error": item.error_message,
        "success": success,
        "reward": item.reward,
        "duration_s": item.rollout_time,
        "started_at": item.start_time,
        "stop_reason": _stop_reason(item),
    }
    if item.status is not None:
        found["status"] = _STATUS.get(item.status, "running")
        if found["status"] != "running":
            found["ended_at"] = item.end_time or now()
    found |= {name: item.cua_rl[name] for name in _EXACT if name in item.cua_rl}
    if found["stop_reason"] is not None and found["stop_reason"] not in tuple(StopReason):
        raise ItemRefused(
            f"expected a stop_reason among {[str(one) for one in StopReason]}, got {found['stop_reason']!r}"
        )
    return {name: value for name, value in found.items() if value is not None}


def _stop_reason(item: sent.SentRollout) -> str | None:
    if item.ran_out_of_turns:
        return StopReason.MAX_TURNS
    return StopReason.FINISHED if item.status == "completed" and item.task_completed else None


def _insert(
    scope: IngestScope, parent: Step | Eval, group_pk: int, task: Any, item: sent.SentRollout, values: dict[str, Any]
) -> int:
    defaults: dict[str, Any] = {"status": "running", "started_at": now(), "seed": _seed(item, task)}
    statement = insert(RolloutRow).values(
        training_id=parent.training_id,
        group_pk=group_pk,
        task_pk=None if task is None else task.id,
        rollout_id=item.rollout_id,
        task_id="unknown" if task is None else task.task_id,
        group_index=item.group_num or 0,
        member_index=item.env_index or 0,
        **(defaults | values),
    )
    row_id = scope.connection.execute(statement.returning(RolloutRow.id)).scalar_one()
    note_status(scope.connection, RolloutRow, row_id, None, (defaults | values)["status"], now())
    return row_id


def _use_environment(scope: IngestScope, env_id: int, rollout_pk: int) -> None:
    """The rollout's device; later updates of the environment reach its row."""
    environment = scope.find_item("environments", env_id)
    values = environment_values(sent.SentEnvironment.model_validate(environment.payload))
    statement = insert(Environment).values(rollout_pk=rollout_pk, **values)
    statement = statement.on_conflict_do_update(index_elements=["rollout_pk"], set_=values)
    row_id = scope.connection.execute(statement.returning(Environment.id)).scalar_one()
    scope.connection.execute(update(IngestItem).where(IngestItem.id == env_id).values(row_id=row_id))
    device = update(RolloutRow).where(RolloutRow.id == rollout_pk, RolloutRow.device_id.is_(None))
    scope.connection.execute(device.values(device_id=values["device_id"]))


def _count(scope: IngestScope, group_pk: int, parent: Step | Eval) -> None:
    """Figures of the group, and of the step or evaluation that it belongs to."""
    has_reward = RolloutRow.reward.is_not(None)
    query = select(
        func.count().filter(RolloutRow.status == "running").label("running"),
        func.count().label("members"),
        func.count().filter(has_reward).label("rewarded"),
        func.count().filter(RolloutRow.status != "running", ~has_reward).label("faulty"),
        func.sum(func.cast(RolloutRow.success, Integer)).filter(has_reward).label("successes"),
        func.avg(RolloutRow.reward).label("mean"),
        func.stddev_pop(RolloutRow.reward).label("std"),
    ).where(RolloutRow.group_pk == group_pk)
    row = scope.connection.execute(query).one()
    has_ended = row.running == 0 and row.members >= (parent.group_size or 1)
    values: dict[str, Any] = {
        "status": "completed" if has_ended else "running",
        "ended_at": now() if has_ended else None,
    }
    if has_ended:
        values |= {
            "num_rollouts": row.rewarded,
            "num_faulty": row.faulty,
            "num_successes": row.successes or 0,
            "reward_mean": row.mean,
            "reward_std": row.std,
        }
    old = scope.connection.execute(select(Group.status).where(Group.id == group_pk)).scalar_one()
    scope.connection.execute(update(Group).where(Group.id == group_pk).values(**values))
    if old == values["status"]:
        return
    note_status(scope.connection, Group, group_pk, old, values["status"], now())
    table = type(parent)
    mine = Group.step_id == parent.id if isinstance(parent, Step) else Group.eval_id == parent.id
    ended = select(func.count()).select_from(Group).where(mine, Group.status == "completed").scalar_subquery()
    known = select(func.count()).select_from(Group).where(mine).scalar_subquery()
    scope.connection.execute(
        update(table)
        .where(table.id == parent.id)
        .values(num_ended_groups=ended, num_groups=func.greatest(table.num_groups, known))
    )
