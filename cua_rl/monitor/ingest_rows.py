"""Items of a batch as rows of the tables that everything else reads."""

from collections.abc import Callable
from hashlib import sha256
from json import dumps
from typing import Any, cast
from uuid import UUID, uuid4

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Environment, Eval, Group, Step, TaskRow, Training, ValidationRow
from cua_rl.database.monitor_models import ProjectRun
from cua_rl.database.rows import note_restart, note_status
from cua_rl.masking import mask_secrets
from cua_rl.monitor import ingest_schemas as sent
from cua_rl.monitor.ingest_rollouts import as_object, environment_values, now, store_rollout
from cua_rl.monitor.ingest_scope import IngestScope, ItemRefused
from cua_rl.monitor.ingest_turns import store_action, store_observation, store_turn

_RUN_STATUS = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}
_STEP_STATUS = {
    "pending": "rollouts",
    "rollout_collecting": "rollouts",
    "rollout_running": "rollouts",
    "running": "rollouts",
    "rollouts": "rollouts",
    "training": "training",
    **_RUN_STATUS,
}
_NOT_SETTINGS = {
    *sent.SentTraining.model_fields,
    *("current_phase", "progress_percent", "status_message", "last_heartbeat", "avg_turn_time"),
    *("estimated_total_time", "estimated_remaining_time"),
}


def store(scope: IngestScope, kind: str, item: Any, *, item_id: int, row_id: int | None) -> int | None:
    """Insert or update the row that belongs to an item; returns its key, None if the kind has none."""
    writers: dict[str, Callable[[], int | None]] = {
        "tasks": lambda: _store_task(scope, item),
        "validators": lambda: None,
        "environments": lambda: _update_environment(scope, item, row_id),
        "steps": lambda: _store_step(scope, item),
        "baselines": lambda: _store_eval(scope, item, "baseline"),
        "evals": lambda: _store_eval(scope, item, "eval"),
        "rollouts": lambda: store_rollout(scope, item),
        "turns": lambda: store_turn(scope, item, item_id),
        "actions": lambda: store_action(scope, item),
        "observations": lambda: store_observation(scope, item),
        "validations": lambda: _store_validation(scope, item),
    }
    return writers[kind]()


def store_training(scope: IngestScope, item: sent.SentTraining, payload: dict[str, Any]) -> int:
    """Insert or update a run; it is known by its training_id, or by its run_name within the project."""
    connection, ours = scope.connection, item.cua_rl
    training_id = None if item.training_id is None else scope.require_run(item.training_id)
    if training_id is None:
        if not item.run_name:
            raise ItemRefused("expected a run_name, or the training_id of a run that was sent before")
        training_id = _find_run(scope, item)
    row = connection.execute(
        select(Training.status, Training.config, Training.attempt_id, Training.heartbeat_at)
        .where(Training.id == training_id)
        .with_for_update()
    ).one()
    values: dict[str, Any] = {"heartbeat_at": now()}
    if item.status is not None:
        values["status"] = _RUN_STATUS.get(item.status, "running")
        ended = values["status"] != "running"
        values["ended_at"] = (item.end_time or now()) if ended else None
    if item.error_message is not None:
        values["error"] = item.error_message
    for column, value in (("total_steps", item.total_steps), ("num_completed_steps", item.current_step)):
        if value is not None:
            values[column] = max(0, value)
    settings = _settings(item, payload)
    if settings:
        values["config"] = row.config | mask_secrets(settings)
    values |= _begin_attempt(scope, training_id, row, ours)
    connection.execute(update(Training).where(Training.id == training_id).values(**values))
    if values.get("status", row.status) != row.status:
        note_status(connection, Training, training_id, row.status, values["status"], now())
    return training_id


def _settings(item: sent.SentTraining, payload: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in payload.items() if name not in _NOT_SETTINGS and value is not None}
    return settings | as_object(item.config_json)


def _find_run(scope: IngestScope, item: sent.SentTraining) -> int:
    """The project's run of that name, inserted if it is new; folders of different machines may have equal names."""
    connection = scope.connection
    folder = f"{scope.project_name}: {item.log_path or item.run_name}"
    query = select(Training.id).where(Training.run_name == item.run_name, Training.log_path == folder)
    found = connection.scalar(query)
    if found is not None:
        return scope.require_run(found)
    started = item.start_time or item.created_at or now()
    statement = insert(Training).values(
        run_name=item.run_name,
        log_path=folder,
        config={},
        image_token_id=int(item.cua_rl.get("image_token_id", 0)),
        attempt_id=_attempt_of(item.cua_rl) or uuid4(),
        status="running",
        first_step=int(item.cua_rl.get("first_step", 1)),
        total_steps=0,
        started_at=started,
        heartbeat_at=now(),
    )
    training_id = connection.execute(statement.returning(Training.id)).scalar_one()
    connection.execute(insert(ProjectRun).values(training_id=training_id, project_id=scope.project_id))
    note_status(connection, Training, training_id, None, "running", started)
    return training_id


def _attempt_of(ours: dict[str, Any]) -> UUID | None:
    """Which start of the run sends this; None if the sender does not say."""
    given = ours.get("attempt")
    try:
        return None if given is None else UUID(str(given))
    except ValueError:
        raise ItemRefused(f"expected a UUID as cua_rl.attempt, got {str(given)[:100]!r}") from None


def _begin_attempt(scope: IngestScope, training_id: int, row: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """A resumed run: void what the earlier attempt left and this one will send again. Nothing if it was sent before."""
    attempt_id = _attempt_of(ours)
    if attempt_id is None or attempt_id == row.attempt_id:
        return {}
    first_step = int(ours.get("first_step", 1))
    connection = scope.connection
    if row.status == "running":
        note_restart(connection, training_id, row.status, row.heartbeat_at, now())
    kept = [str(name) for name in ours.get("kept_group_ids", ())]
    later = [Step.training_id == training_id, Step.step >= first_step]
    with_kept = select(Group.step_id).where(Group.training_id == training_id, Group.group_id.in_(kept))
    keys = set(connection.scalars(select(Step.id).where(*later, Step.id.in_(with_kept))))
    connection.execute(delete(Step).where(*later, Step.id.not_in(keys)))
    connection.execute(delete(Group).where(Group.step_id.in_(keys), Group.group_id.not_in(kept)))
    unfinished = or_(Eval.step >= first_step, Eval.status != "completed")
    connection.execute(delete(Eval).where(Eval.training_id == training_id, unfinished))
    done = select(func.count()).select_from(Step).where(Step.training_id == training_id, Step.status == "completed")
    return {
        "attempt_id": attempt_id,
        "first_step": first_step,
        "num_attempts": Training.num_attempts + 1,
        "num_completed_steps": connection.execute(done).scalar_one(),
    }


def _store_task(scope: IngestScope, item: sent.SentTask) -> int:
    values: dict[str, Any] = {
        "task_id": item.task_id or item.client_id or item.name or "task",
        "seed": int(item.cua_rl.get("seed", 0)),
        "instruction": item.instruction or item.description or item.name or "",
        "category": item.category or "",
        "difficulty": item.difficulty or "",
        "max_turns": item.max_steps or 0,
        "tags": [tag.replace("\0", "") for tag in item.tags or []],
    }
    digest = sha256(f"{scope.project_id} {dumps(values, sort_keys=True)}".encode("utf-8", "replace")).hexdigest()
    statement = insert(TaskRow).values(definition_sha256=digest, **values).on_conflict_do_nothing()
    inserted = scope.connection.scalar(statement.returning(TaskRow.id))
    if inserted is not None:
        return inserted
    return scope.connection.scalars(select(TaskRow.id).where(TaskRow.definition_sha256 == digest)).one()


def _update_environment(scope: IngestScope, item: sent.SentEnvironment, row_id: int | None) -> int | None:
    """The row appears with the rollout that uses the environment."""
    if row_id is not None:
        values = environment_values(item)
        scope.connection.execute(update(Environment).where(Environment.id == row_id).values(**values))
    return row_id


def _metrics(item: sent.SentSource) -> dict[str, float]:
    named = {
        "loss/total": item.loss,
        "policy/kl_sampling_training/mean": item.kl_divergence,
        "optim/grad_norm": item.policy_gradient_norm,
        "optim/learning_rate": item.learning_rate,
        "reward/mean": item.reward_mean,
        "reward/std": item.reward_std,
        "reward/success_rate": item.success_rate,
        "rollout/num_rollouts": item.num_trajectories,
        "rollout/sampled_tokens": item.num_tokens,
        "rollout/num_turns/mean": item.avg_turns,
    }
    metrics = {name: float(value) for name, value in named.items() if value is not None}
    given = as_object(item.metrics_json)
    return metrics | {
        name[:300]: float(value)
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


def _counts(item: sent.SentSource) -> dict[str, Any]:
    progress = as_object(item.rollout_progress)
    counts = {
        "num_groups": progress.get("total_groups", item.total_tasks),
        "num_ended_groups": progress.get("completed_groups", item.completed_tasks),
    }
    return {
        name: min(max(0, int(value)), 2**31 - 1)
        for name, value in counts.items()
        if isinstance(value, int | float) and abs(value) < 1e9
    }


def _store_step(scope: IngestScope, item: sent.SentSource) -> int:
    if item.step is None or item.step < 0:
        raise ItemRefused(f"expected the number of a step, 0 or more, got {item.step!r}")
    ours = {
        name: item.cua_rl[name]
        for name in ("policy_version", "trained_policy_version", "num_datums", "datums_sha256", "group_size")
        if name in item.cua_rl
    }
    values = _source_values(item, _STEP_STATUS) | ours
    if item.rollout_end_time is not None:
        values["rollouts_ended_at"] = item.rollout_end_time
    row_id = _upsert_source(scope, Step, {"step": item.step}, item, values)
    if "group_ids" in item.cua_rl:
        _take_groups(scope, cast("int", item.training_id), row_id, item.cua_rl["group_ids"])
    if values.get("status") == "completed":
        done = select(func.count()).select_from(Step).where(Step.status == "completed")
        count = done.where(Step.training_id == item.training_id).scalar_subquery()
        statement = update(Training).where(Training.id == item.training_id)
        scope.connection.execute(statement.values(num_completed_steps=count, heartbeat_at=now()))
    return row_id


def _take_groups(scope: IngestScope, training_id: int, step_id: int, group_ids: object) -> None:
    """The step trains these groups of its run, wherever they were counted so far."""
    names = [str(name) for name in cast("list[object]", group_ids)] if isinstance(group_ids, list) else []
    mine = [Group.training_id == training_id, Group.step_id.is_not(None), Group.group_id.in_(names)]
    scope.connection.execute(update(Group).where(*mine).values(step_id=step_id))


def _store_eval(scope: IngestScope, item: sent.SentSource, phase: str) -> int:
    ours = {name: item.cua_rl[name] for name in ("policy_version", "group_size") if name in item.cua_rl}
    values = _source_values(item, _RUN_STATUS | {"pending": "running", "running": "running"}) | ours
    return _upsert_source(scope, Eval, {"phase": phase, "step": max(0, item.step or 0)}, item, values)


def _source_values(item: sent.SentSource, statuses: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = _counts(item)
    metrics = _metrics(item)
    if metrics:
        values["metrics"] = metrics
    if item.status is not None:
        if item.status not in statuses:
            raise ItemRefused(f"expected a status among {sorted(statuses)}, got {item.status!r}")
        values["status"] = statuses[item.status]
        if values["status"] in _RUN_STATUS:
            values["ended_at"] = now()
    if item.start_time is not None:
        values["started_at"] = item.start_time
    if item.end_time is not None:
        values["ended_at"] = item.end_time
    return values


def _upsert_source(
    scope: IngestScope,
    table: type[Step] | type[Eval],
    key: dict[str, Any],
    item: sent.SentSource,
    values: dict[str, Any],
) -> int:
    training_id = scope.require_run(cast("int", item.training_id))
    conditions = [getattr(table, name) == value for name, value in key.items()]
    query = select(table.id, table.status, table.metrics).where(table.training_id == training_id, *conditions)
    row = scope.connection.execute(query).one_or_none()
    if row is not None:
        if "metrics" in values:
            values["metrics"] = (row.metrics or {}) | values["metrics"]
        if values:
            scope.connection.execute(update(table).where(table.id == row.id).values(**values))
        if values.get("status", row.status) != row.status:
            note_status(scope.connection, table, row.id, row.status, values["status"], now())
        return row.id
    defaults: dict[str, Any] = {
        "status": "rollouts" if table is Step else "running",
        "policy_version": key["step"],
        "group_size": 1,
        "num_groups": 0,
        "started_at": now(),
    }
    attempt = select(Training.attempt_id).where(Training.id == training_id).scalar_subquery()
    inserted = insert(table).values(
        training_id=training_id, attempt_id=attempt, task_pks=[], **key, **(defaults | values)
    )
    row_id = scope.connection.execute(inserted.returning(table.id)).scalar_one()
    note_status(scope.connection, table, row_id, None, (defaults | values)["status"], now())
    return row_id


def _store_validation(scope: IngestScope, item: sent.SentValidation) -> int:
    rollout_pk = scope.require_row("rollouts", cast("int", item.rollout_id))
    values = {
        "query": item.validation_query or "",
        "expected": _text(item.expected_result),
        "actual": _text(item.actual_result),
        "success": item.success,
        "duration_s": item.execution_time or 0.0,
    }
    statement = insert(ValidationRow).values(rollout_pk=rollout_pk, **values)
    statement = statement.on_conflict_do_update(index_elements=["rollout_pk"], set_=values)
    return scope.connection.execute(statement.returning(ValidationRow.id)).scalar_one()


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)
