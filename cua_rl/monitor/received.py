"""Converts items of other programs to reports: their names become ours, and values that fit no column are refused."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from json import dumps
from types import UnionType
from typing import Any, cast
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from cua_rl.database.reports import SourceReport, TrainingReport
from cua_rl.events import Phase, RolloutSource
from cua_rl.host.masking import mask_secrets
from cua_rl.monitor import ingest_schemas as sent
from cua_rl.tasks.task import Task
from cua_rl.types.errors import CuaError
from cua_rl.types.json_values import is_array, is_object, mapping
from cua_rl.types.judgement import Judgement, Validation
from cua_rl.types.rollout import StopReason

Columns = dict[str, Any]

_JUDGEMENT = TypeAdapter(Judgement)
_ENDED = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}
_EVAL_STATUS = {"pending": "running", "running": "running", **_ENDED}
_STEP_STATUS = {
    "pending": "rollouts",
    "rollout_collecting": "rollouts",
    "rollout_running": "rollouts",
    "running": "rollouts",
    "rollouts": "rollouts",
    "training": "training",
    **_ENDED,
}
_DEVICE_STATUS = {"terminated": "released", "error": "failed", "failed": "failed"}
_MAX_SECONDS = 1e11
_MAX_SETTINGS_CHARACTERS = 2**20  # masking more takes over two seconds, here and whenever they are shown
_STAGES = {"model_inference": "respond", "action_exec": "execute", "screenshot_after": "observe"}
_NOT_SETTINGS = {
    *sent.SentTraining.model_fields,
    *("current_phase", "progress_percent", "status_message", "last_heartbeat", "avg_turn_time"),
    *("estimated_total_time", "estimated_remaining_time"),
}
_NOT_OF_EVAL = {*sent.OursOfStep.model_fields} - {*sent.OursOfEval.model_fields}


class ItemRefused(CuaError):
    """An item cannot be stored; its sender gets the message."""


def training_report(item: sent.SentTraining, payload: Mapping[str, Any], run_name: str, folder: str) -> TrainingReport:
    """The run of that name in `folder`; fields of the payload without a column become settings."""
    ours = item.cua_rl
    try:
        attempt_id = None if ours.attempt is None else UUID(ours.attempt)
    except ValueError:
        raise ItemRefused(f"expected a UUID as cua_rl.attempt, got {str(ours.attempt)[:100]!r}") from None
    columns: Columns = {}
    if item.status is not None:
        columns["status"] = _ENDED.get(item.status, "running")
        columns["ended_at"] = None if columns["status"] == "running" else item.end_time or datetime.now(UTC)
    if item.error_message is not None:
        columns["error"] = item.error_message
    for column, value in (("total_steps", item.total_steps), ("num_completed_steps", item.current_step)):
        if value is not None:
            columns[column] = max(0, value)
    settings = {name: value for name, value in payload.items() if name not in _NOT_SETTINGS and value is not None}
    settings |= item.config_json or {}
    require_short_settings(len(dumps(settings)))
    return TrainingReport(
        run_name=run_name,
        log_path=folder,
        attempt_id=attempt_id,
        image_token_id=ours.image_token_id,
        first_step=ours.first_step,
        kept_group_ids=tuple(ours.kept_group_ids),
        started_at=item.start_time or item.created_at,
        settings=mask_secrets(settings),
        columns=columns,
    )


def require_short_settings(length: int) -> None:
    """Raise `ItemRefused` if the settings of a run, as JSON, have too many characters."""
    if length > _MAX_SETTINGS_CHARACTERS:
        raise ItemRefused(
            f"expected a config_json of at most {_MAX_SETTINGS_CHARACTERS} characters, got {length}; leave out parts"
        )


def task_of(item: sent.SentTask) -> Task:
    """The task as far as it is shown; its sender validates it."""
    return Task(
        task_id=item.task_id or item.client_id or item.name or "task",
        seed=item.cua_rl.seed,
        instruction=item.instruction or item.description or item.name or "",
        category=cast("Any", item.category or ""),
        difficulty=cast("Any", item.difficulty or ""),
        max_turns=item.max_steps or 0,
        validate=None,
        tags=tuple(item.tags or ()),
    )


def device_columns(item: sent.SentEnvironment) -> Columns:
    return {
        "device_id": item.gbox_id or item.box_type or item.env_type or "unknown",
        "status": _DEVICE_STATUS.get(item.status or "", "running"),
        "error": item.error_message,
        "started_at": item.creation_time or item.start_time or item.created_at or datetime.now(UTC),
        "ended_at": item.termination_time or item.end_time,
    }


def source_report(item: sent.SentSource, phase: Phase) -> SourceReport:
    """A step, or an evaluation; one without a number is the baseline's, at step 0."""
    is_step = phase == "step"
    if is_step and (item.step is None or item.step < 0):
        raise ItemRefused(f"expected the number of a step, 0 or more, got {item.step!r}")
    progress = mapping(item.rollout_progress)
    counts = {
        "num_groups": progress.get("total_groups", item.total_tasks),
        "num_ended_groups": progress.get("completed_groups", item.completed_tasks),
    }
    columns: Columns = {
        name: min(max(0, int(value)), 2**31 - 1)
        for name, value in counts.items()
        if isinstance(value, int | float) and abs(value) < 1e9
    }
    metrics = _metrics(item)
    if metrics:
        columns["metrics"] = metrics
    if item.status is not None:
        statuses = _STEP_STATUS if is_step else _EVAL_STATUS
        if item.status not in statuses:
            raise ItemRefused(f"expected a status among {sorted(statuses)}, got {item.status!r}")
        columns["status"] = statuses[item.status]
    if item.start_time is not None:
        columns["started_at"] = item.start_time
    if item.end_time is not None or columns.get("status") in _ENDED:
        columns["ended_at"] = item.end_time or datetime.now(UTC)
    if is_step and item.rollout_end_time is not None:
        columns["rollouts_ended_at"] = item.rollout_end_time
    ours = item.cua_rl.named()
    group_ids = ours.pop("group_ids", None)
    if not is_step:
        ours = {name: value for name, value in ours.items() if name not in _NOT_OF_EVAL}
    return SourceReport(
        training_id=cast("int", item.training_id),
        source=RolloutSource(phase=phase, step=max(0, item.step or 0)),
        columns=columns | ours,
        group_ids=None if group_ids is None or not is_step else tuple(group_ids),
    )


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
    return metrics | {
        name[:300]: float(value)
        for name, value in (item.metrics_json or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


def rollout_columns(item: sent.SentRollout) -> Columns:
    success = item.task_success if item.task_success is not None else item.validation_passed
    num_turns = item.num_turns if item.num_turns is not None else item.current_turn
    summary = item.summary_json or {}
    if success is None and isinstance(summary.get("task_success"), bool):
        success = summary["task_success"]
    finished = StopReason.FINISHED if item.status == "completed" and item.task_completed else None
    columns: Columns = {
        "max_turns": item.max_turns,
        "num_turns": None if num_turns is None else max(0, num_turns),
        "error": item.error_message,
        "success": success,
        "reward": item.reward,
        "duration_s": item.rollout_time,
        "started_at": item.start_time,
        "stop_reason": StopReason.MAX_TURNS if item.ran_out_of_turns else finished,
    }
    if item.status is not None:
        columns["status"] = _ENDED.get(item.status, "running")
        if columns["status"] != "running":
            columns["ended_at"] = item.end_time or datetime.now(UTC)
    columns |= {name: value for name, value in item.cua_rl.named().items() if name not in ("group_id", "judgement")}
    if columns["stop_reason"] is not None and columns["stop_reason"] not in tuple(StopReason):
        raise ItemRefused(
            f"expected a stop_reason among {[str(one) for one in StopReason]}, got {columns['stop_reason']!r}"
        )
    return {name: value for name, value in columns.items() if value is not None}


def judgement_of(given: object) -> Judgement | None:
    """A judge's verdict; prompts are stored by their hash, so the hash must be right."""
    if given is None:
        return None
    try:
        judgement = _JUDGEMENT.validate_python(given)
    except ValidationError as error:
        raise ItemRefused(f"expected a judgement with its votes, got {error.error_count()} mistakes in it") from None
    if judgement.prompt_sha256 != sha256(judgement.prompt.encode("utf-8", "surrogatepass")).hexdigest():
        raise ItemRefused("expected prompt_sha256 to be the hash of the judgement's prompt, got another")
    return judgement


def turn_columns(item: sent.SentTurn) -> Columns:
    """What this item says about the turn, apart from its screenshots."""
    timings = mapping((item.metrics_json or {}).get("stage_timings"))
    stages = {
        _STAGES.get(name, name): float(value)
        for name, value in timings.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_SECONDS
    }
    text = item.model_response if item.model_response is not None else item.text
    if item.thinking and "<think>" not in (text or ""):
        text = f"<think>\n{item.thinking}\n</think>\n\n{text or ''}"
    columns: Columns = {
        "text": text,
        "request": request_of(item.model_specific_input_json),
        "action": None if item.action_json is None else _action(item.action_json, None),
        "started_at": item.start_time,
        "started_unix_s": None if item.start_time is None else item.start_time.timestamp(),
        "durations_s": stages or None,
        "duration_s": stages.get("respond") if stages else item.turn_time,
    }
    return {name: value for name, value in columns.items() if value is not None} | _exact_columns(item.cua_rl)


def _exact_columns(ours: sent.OursOfTurn) -> Columns:
    """Columns that only our own sender names."""
    columns = ours.named()
    if "prompt_chunks" in columns and not _are_chunks(ours.prompt_chunks, len(ours.prompt_token_ids)):
        raise ItemRefused("expected cua_rl.prompt_chunks to cover cua_rl.prompt_token_ids")
    return columns


def _are_chunks(chunks: Sequence[object], num_tokens: int) -> bool:
    covered = 0
    for chunk in chunks:
        match chunk:
            # pyrefly: ignore[not-callable]
            case {"image": str(), "tokens": int(length)} | {"text": int(length)} if length >= 0:
                covered += length
            case _:
                return False
    return covered == num_tokens


def _holds(value: object, kind: type[int] | UnionType) -> bool:
    return is_array(value) and all(
        isinstance(one, kind)
        and (isinstance(one, float) or (isinstance(one, int) and not isinstance(one, bool) and abs(one) < 2**31))
        for one in value
    )


def request_of(value: object) -> Columns | None:
    """The model's input: JSON objects as they are, other JSON under "input"."""
    if value is None:
        return None
    return {**value} if is_object(value) else {"input": value}


def _action(raw: object, kind: str | None) -> Columns:
    """An action of another program: its own fields, under the type that it names."""
    fields = raw if is_object(raw) else {"value": raw}
    names = (kind, fields.get("type"), fields.get("action_type"), fields.get("action"))
    name = next((name for name in names if isinstance(name, str) and name), "action")
    return {**fields, "type": name}


def action_columns(item: sent.SentAction) -> Columns:
    """What the turn did, with its tokens if they come with log-probabilities."""
    raw = item.action_json if item.action_json is not None else item.action_args
    columns: Columns = {}
    if raw is not None or item.action_name or item.action_type:
        columns["action"] = _action({} if raw is None else raw, item.action_name or item.action_type)
    tokens, logprobs = item.tokens, item.logprobs
    if _holds(tokens, int) and _holds(logprobs, int | float) and len(tokens) == len(logprobs):
        columns |= {"sampled_tokens": tokens, "sampling_logprobs": [float(value) for value in logprobs]}
    return columns


def validation_of(item: sent.SentValidation) -> Validation:
    """A validator's result; what is not text is shown as JSON."""
    texts = [item.validation_query or "", item.expected_result, item.actual_result]
    query, expected, actual = (
        value if isinstance(value, str) else "" if value is None else dumps(value) for value in texts
    )
    duration_s = item.execution_time or 0.0
    return Validation(query=query, expected=expected, actual=actual, success=item.success, duration_s=duration_s)
