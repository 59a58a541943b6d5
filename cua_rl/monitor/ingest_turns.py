"""Turns that are sent, as rows; actions and observations complete them."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TurnRow
from cua_rl.monitor import ingest_schemas as sent
from cua_rl.monitor.ingest_images import PREFIX, stored_hash
from cua_rl.monitor.ingest_rollouts import as_object, now
from cua_rl.monitor.ingest_scope import IngestScope, ItemRefused

_STAGES = {"model_inference": "respond", "action_exec": "execute", "screenshot_after": "observe"}
_EXACT = (
    *("response_id", "prompt_token_ids", "prompt_chunks", "sampled_tokens", "sampling_logprobs", "training_logprobs"),
    *("policy_version", "stop", "text", "failure_kind", "failure_message", "prompt_matches_renderer", "request"),
    *("cached_tokens", "started_unix_s", "duration_s", "durations_s", "action", "action_error"),
)
_INT_LISTS = ("prompt_token_ids", "sampled_tokens")
_FLOAT_LISTS = ("sampling_logprobs", "training_logprobs")


def store_turn(scope: IngestScope, item: sent.SentTurn, item_id: int) -> int:
    """Insert or update a turn; the interface counts turns from 1, we from 0."""
    rollout_pk = scope.require_row("rollouts", cast("int", item.rollout_id))
    values = _values(item) | _screens(scope, item)
    turn_index = item.turn - 1
    query = select(TurnRow.id).where(TurnRow.rollout_pk == rollout_pk, TurnRow.turn_index == turn_index)
    row_id = scope.connection.scalar(query)
    if row_id is None:
        started = values.get("started_at") or now()
        defaults: dict[str, Any] = {
            "response_id": f"ingest-{item_id}",
            "prompt_token_ids": [],
            "prompt_chunks": [],
            "sampled_tokens": [],
            "sampling_logprobs": [],
            "policy_version": _policy_version(scope, rollout_pk),
            "stop": "stop",
            "text": "",
            "prompt_matches_renderer": True,
            "request": {},
            "cached_tokens": 0,
            "started_at": started,
            "started_unix_s": started.timestamp(),
            "duration_s": 0.0,
            "durations_s": {},
        }
        statement = insert(TurnRow).values(rollout_pk=rollout_pk, turn_index=turn_index, **(defaults | values))
        row_id = scope.connection.execute(statement.returning(TurnRow.id)).scalar_one()
    elif values:
        scope.connection.execute(update(TurnRow).where(TurnRow.id == row_id).values(**values))
    count = func.greatest(RolloutRow.num_turns, item.turn)
    scope.connection.execute(update(RolloutRow).where(RolloutRow.id == rollout_pk).values(num_turns=count))
    return row_id


def _policy_version(scope: IngestScope, rollout_pk: int) -> int:
    query = (
        select(func.coalesce(Step.policy_version, Eval.policy_version))
        .select_from(RolloutRow)
        .join(Group, Group.id == RolloutRow.group_pk)
        .outerjoin(Step, Step.id == Group.step_id)
        .outerjoin(Eval, Eval.id == Group.eval_id)
        .where(RolloutRow.id == rollout_pk)
    )
    return scope.connection.scalar(query) or 0


def _values(item: sent.SentTurn) -> dict[str, Any]:
    stages = _stages(item)
    values = {
        "text": _text(item),
        "request": _object(item.model_specific_input_json),
        "action": None if item.action_json is None else _action(item.action_json, None),
        "started_at": item.start_time,
        "started_unix_s": None if item.start_time is None else item.start_time.timestamp(),
        "durations_s": stages,
        "duration_s": stages.get("respond") if stages else item.turn_time,
    }
    found = {name: value for name, value in values.items() if value is not None}
    return found | _exact(item.cua_rl)


def _exact(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that only our own sender knows, checked before the database does."""
    values = {name: ours[name] for name in _EXACT if name in ours}
    for name in _INT_LISTS:
        if name in values and not _holds(values[name], int):
            raise ItemRefused(f"expected cua_rl.{name} to be a list of token ids")
    for name in _FLOAT_LISTS:
        if values.get(name) is not None and not _holds(values[name], int | float):
            raise ItemRefused(f"expected cua_rl.{name} to be a list of numbers")
        if values.get(name) is not None:
            values[name] = [float(value) for value in values[name]]
    if "prompt_chunks" in values and not _are_chunks(values["prompt_chunks"], values.get("prompt_token_ids")):
        raise ItemRefused("expected cua_rl.prompt_chunks to cover cua_rl.prompt_token_ids")
    return values


def _are_chunks(chunks: object, tokens: object) -> bool:
    if not isinstance(chunks, list) or not isinstance(tokens, list):
        return False
    covered = 0
    for chunk in cast("list[object]", chunks):
        match chunk:
            # pyrefly: ignore[not-callable]
            case {"image": str(), "tokens": int(length)} | {"text": int(length)} if length >= 0:
                covered += length
            case _:
                return False
    return covered == len(cast("list[object]", tokens))


def _holds(value: object, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, kind) and not isinstance(one, bool) and (isinstance(one, float) or abs(one) < 2**31)
        for one in cast("list[Any]", value)
    )


def _text(item: sent.SentTurn) -> str | None:
    text = item.model_response if item.model_response is not None else item.text
    if item.thinking and "<think>" not in (text or ""):
        return f"<think>\n{item.thinking}\n</think>\n\n{text or ''}"
    return text


def _stages(item: sent.SentTurn) -> dict[str, float] | None:
    found = as_object(as_object(item.metrics_json).get("stage_timings"))
    stages = {
        _STAGES.get(name, name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and isfinite(value) and not isinstance(value, bool)
    }
    return stages or None


def _object(value: object) -> dict[str, Any] | None:
    """JSON objects as they are, other JSON as the input that it is, None if there is none."""
    if value is None:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"input": value}


def _action(raw: object, kind: str | None) -> dict[str, Any]:
    """An action of another program: its own fields, under the type that it names."""
    fields = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {"value": raw}
    names = (kind, fields.get("type"), fields.get("action_type"), fields.get("action"))
    name = next((name for name in names if isinstance(name, str) and name), "action")
    return {**fields, "type": name}


def _screens(scope: IngestScope, item: sent.SentTurn) -> dict[str, Any]:
    """Hashes of the screenshots that are stored; one that was announced by its hash must have been sent."""
    found: dict[str, Any] = {}
    for column, value in (("before_sha256", item.screen_before), ("after_sha256", item.screen_after)):
        digest = stored_hash(scope.connection, value)
        if digest is not None:
            found[column] = digest
        elif value is not None and value.startswith(PREFIX):
            raise ItemRefused(f"expected a screenshot that was sent before, got {value[:80]!r}; send it as a data URI")
    return found


def store_action(scope: IngestScope, item: sent.SentAction) -> int:
    """What the turn did, with its tokens if they come with log-probabilities."""
    row_id = scope.require_row("turns", cast("int", item.turn_id))
    raw = item.action_json if item.action_json is not None else item.action_args
    values: dict[str, Any] = {}
    if raw is not None or item.action_name or item.action_type:
        values["action"] = _action({} if raw is None else raw, item.action_name or item.action_type)
    tokens, logprobs = item.tokens, item.logprobs
    if _holds(tokens, int) and _holds(logprobs, int | float) and len(tokens) == len(logprobs):
        values |= {"sampled_tokens": tokens, "sampling_logprobs": [float(value) for value in logprobs]}
    if item.cua_rl.get("is_exact"):
        values.pop("action", None)  # the turn itself has it, as our own action
    if values:
        scope.connection.execute(update(TurnRow).where(TurnRow.id == row_id).values(**values))
    return row_id


def store_observation(scope: IngestScope, item: sent.SentObservation) -> int:
    """A screenshot before or after the turn, or what the model was asked."""
    row_id = scope.require_row("turns", cast("int", item.turn_id))
    values: dict[str, Any] = {}
    digest = stored_hash(scope.connection, item.screenshot_uri)
    column = {"screenshot_before": "before_sha256", "screenshot_after": "after_sha256"}.get(item.obs_type or "")
    if digest is not None and column is not None:
        values[column] = digest
    request = _object(item.model_input_json)
    if request is not None and item.obs_type == "model_input":
        values["request"] = request
    if values:
        scope.connection.execute(update(TurnRow).where(TurnRow.id == row_id).values(**values))
    return row_id
