"""Request and response of the ingest API. Items are parsed tolerantly; fields without a column are stored as sent.

Names are those of the ingest interface: `max_steps` of a task are turns, `turn` counts from 1, ids are those that
earlier answers gave. Our own sender adds an object `cua_rl` with values for which the interface has no field; they go
to columns as they are, so their types are exact.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from cua_rl.host.request_limits import RequestRefused, parse_json
from cua_rl.monitor.schemas import Shown
from cua_rl.types.json_values import JsonDict, is_array

_YEARS = (1990, 2200)


def _parse_time(value: object) -> object:
    """ISO 8601 or Unix seconds; without a zone it is UTC."""
    if value is None or value == "":
        return None
    if isinstance(value, int | float):
        parsed = datetime.fromtimestamp(value, UTC) if 6e8 < value < 7e9 else None
    else:
        parsed = datetime.fromisoformat(str(value).strip())
        parsed = parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    if parsed is None or not _YEARS[0] <= parsed.year <= _YEARS[1]:
        raise ValueError(f"expected a time between {_YEARS[0]} and {_YEARS[1]}, got {value!r}")
    return parsed


def _parse_json(value: object) -> object:
    """JSON, or text that holds JSON; other text stays text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except RequestRefused as refused:
        if isinstance(refused.__cause__, ValueError):
            return value
        raise ValueError(refused.message) from None  # it would be too deep for every page


def _parse_object(value: object) -> object:
    """A JSON object, or text that holds one; None for empty text."""
    return None if value == "" else _parse_json(value)


def _finite(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        return None
    return None if isinstance(value, float) and not isfinite(value) else value


def _words(value: object) -> object:
    """A list of words, JSON of one, or words with commas."""
    value = _parse_json(value)
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return list(map(str, value)) if is_array(value) else value


def _text_of(max_length: int) -> Callable[[object], str | None]:
    """Any text: a model can sample lone surrogates, which pydantic's own `str` rejects."""

    def parse(value: object) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"expected text, got {type(value).__name__}")
        if value is not None and len(value) > max_length:
            raise ValueError(f"expected at most {max_length} characters, got {len(value)}")
        return value

    return parse


Time = Annotated[datetime | None, BeforeValidator(_parse_time)]
Number = Annotated[float | None, BeforeValidator(_finite)]
Integer = Annotated[int | None, Field(ge=-(2**31), lt=2**31)]
Key = Annotated[int | None, Field(ge=1, lt=2**63)]
Text = Annotated[str | None, PlainValidator(_text_of(4_000_000))]
Name = Annotated[str | None, PlainValidator(_text_of(500))]
AnyJson = Annotated[Any, BeforeValidator(_parse_json)]
JsonObject = Annotated[JsonDict | None, BeforeValidator(_parse_object)]
Words = Annotated[list[str] | None, BeforeValidator(_words), Field(max_length=100)]


Count = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
"""A duration, or Unix time."""
Names = Annotated[list[Annotated[str, Field(max_length=500)]], Field(max_length=100_000)]
NamedValues = dict[str, float | None]
TokenIds = list[Count]


class Ours(BaseModel):
    """What only our own sender says, in columns' own types; names that are no columns are left out."""

    model_config = ConfigDict(strict=True)

    def named(self) -> JsonDict:
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class OursOfTraining(Ours):
    attempt: Name = None
    first_step: Count = 1
    image_token_id: Count = 0
    kept_group_ids: Names = Field(default_factory=list[str])


class OursOfTask(Ours):
    seed: Seed = 0


class OursOfEval(Ours):
    policy_version: Count = 0
    group_size: Count = 1


class OursOfStep(OursOfEval):
    trained_policy_version: Count | None = None
    num_datums: Count | None = None
    datums_sha256: Name = None
    trained_on: Name = None
    adapter_sha256: Name = None


class OursOfSource(OursOfStep):
    group_ids: Names | None = None


class OursOfRollout(Ours):
    advantage: float | None = None
    turn_advantages: list[float] | None = None
    turn_rewards: list[float] | None = None
    stop_reason: Name = None
    reward_parts: NamedValues | None = None
    started_unix_s: Seconds | None = None
    duration_s: Seconds | None = None
    answer: Text = None
    seed: Seed | None = None
    position: Count | None = None
    group_id: Name = None
    worker: Name = None
    parent_id: Name = None
    fork_turn: Count | None = None
    judgement: JsonDict | None = None


class OursOfTurn(Ours):
    response_id: Name = None
    prompt_token_ids: TokenIds = Field(default_factory=list[int])
    prompt_chunks: list[JsonDict] = Field(default_factory=list[JsonDict])
    sampled_tokens: TokenIds = Field(default_factory=list[int])
    sampling_logprobs: list[float] = Field(default_factory=list[float])
    training_logprobs: list[float] | None = None
    policy_version: Count = 0
    stop: Name = None
    text: Text = None
    failure_kind: Name = None
    failure_message: Text = None
    prompt_matches_renderer: bool = True
    request: JsonDict = Field(default_factory=JsonDict)
    grammar: Text = None
    state: Text = None
    cached_tokens: Count = 0
    started_unix_s: Seconds = 0.0
    duration_s: Seconds = 0.0
    durations_s: dict[str, Seconds] = Field(default_factory=dict[str, float])
    action: JsonDict | None = None
    action_error: Text = None
    target_box: list[Annotated[int, Field(ge=-(2**31), lt=2**31)]] | None = None


class Sent(BaseModel):
    """Base of all items."""

    model_config = ConfigDict(extra="allow")

    client_id: Name = None
    status: Name = None
    error_message: Text = None
    start_time: Time = None
    end_time: Time = None
    created_at: Time = None


class SentTraining(Sent):
    training_id: Key = None
    run_name: Name = None
    log_path: Name = None
    config_json: JsonObject = None
    current_step: Integer = None
    total_steps: Integer = None
    cua_rl: OursOfTraining = Field(default_factory=OursOfTraining)


class SentTask(Sent):
    task_id: Name = None
    name: Text = None
    instruction: Text = None
    description: Text = None
    difficulty: Name = None
    category: Name = None
    max_steps: Integer = None
    tags: Words = None
    cua_rl: OursOfTask = Field(default_factory=OursOfTask)


class SentEnvironment(Sent):
    env_type: Name = None
    gbox_id: Name = None
    box_type: Name = None
    creation_time: Time = None
    termination_time: Time = None


class SentSource(Sent):
    """A step, a baseline or an evaluation."""

    training_id: Key
    step: Integer = None
    learning_rate: Number = None
    loss: Number = None
    kl_divergence: Number = None
    policy_gradient_norm: Number = None
    reward_mean: Number = None
    reward_std: Number = None
    success_rate: Number = None
    avg_reward: Number = None
    avg_turns: Number = None
    num_trajectories: Integer = None
    num_tokens: Integer = None
    total_tasks: Integer = None
    completed_tasks: Integer = None
    rollout_progress: JsonObject = None
    metrics_json: JsonObject = None
    rollout_end_time: Time = None
    cua_rl: OursOfSource = Field(default_factory=OursOfSource)


class SentRollout(Sent):
    rollout_id: Annotated[str, Field(min_length=1, max_length=200)]
    source_type: Annotated[str | None, Field(pattern="^(baseline|eval|step)$")] = None
    step_id: Key = None
    eval_id: Key = None
    baseline_id: Key = None
    env_id: Key = None
    task_id: Key = None
    group_num: Integer = None
    group_id: AnyJson = None
    env_index: Integer = None
    max_turns: Integer = None
    num_turns: Integer = None
    current_turn: Integer = None
    task_success: bool | None = None
    validation_passed: bool | None = None
    reward: Number = None
    ran_out_of_turns: bool | None = None
    task_completed: bool | None = None
    rollout_time: Number = None
    summary_json: JsonObject = None
    cua_rl: OursOfRollout = Field(default_factory=OursOfRollout)


class SentTurn(Sent):
    rollout_id: Key
    turn: Annotated[int, Field(ge=1, le=1_000_000)]
    turn_time: Number = None
    model_response: Text = None
    thinking: Text = None
    text: Text = None
    metrics_json: JsonObject = None
    action_json: AnyJson = None
    model_specific_input_json: AnyJson = None
    screen_before: Text = None
    screen_after: Text = None
    cua_rl: OursOfTurn = Field(default_factory=OursOfTurn)


class SentAction(Sent):
    turn_id: Key
    action_type: Name = None
    action_name: Name = None
    action_args: AnyJson = None
    action_json: AnyJson = None
    tokens: AnyJson = None
    logprobs: AnyJson = None


class SentObservation(Sent):
    turn_id: Key
    obs_type: Name = None
    screenshot_uri: Text = None
    text_content: Text = None
    model_input_json: AnyJson = None


class SentValidation(Sent):
    rollout_id: Key
    validation_query: Text = None
    expected_result: AnyJson = None
    actual_result: AnyJson = None
    success: bool
    execution_time: Number = None
    details_json: JsonObject = None


class SentValidator(Sent):
    """Stored, but not shown."""


ITEM_CLASSES: dict[str, type[Sent]] = {
    "tasks": SentTask,
    "validators": SentValidator,
    "environments": SentEnvironment,
    "steps": SentSource,
    "baselines": SentSource,
    "evals": SentSource,
    "rollouts": SentRollout,
    "turns": SentTurn,
    "actions": SentAction,
    "observations": SentObservation,
    "validations": SentValidation,
}
"""Kinds in the order in which a batch is stored: items come after those that they refer to."""

Items = Annotated[list[dict[str, Any]], Field(max_length=2000)]


class IngestBatch(BaseModel):
    """Any subset of kinds. An item that was sent before, by its `client_id`, is updated."""

    model_config = ConfigDict(extra="forbid")

    training: dict[str, Any] | None = None
    tasks: Items = Field(default_factory=list[dict[str, Any]])
    validators: Items = Field(default_factory=list[dict[str, Any]])
    environments: Items = Field(default_factory=list[dict[str, Any]])
    steps: Items = Field(default_factory=list[dict[str, Any]])
    baselines: Items = Field(default_factory=list[dict[str, Any]])
    evals: Items = Field(default_factory=list[dict[str, Any]])
    rollouts: Items = Field(default_factory=list[dict[str, Any]])
    turns: Items = Field(default_factory=list[dict[str, Any]])
    actions: Items = Field(default_factory=list[dict[str, Any]])
    observations: Items = Field(default_factory=list[dict[str, Any]])
    validations: Items = Field(default_factory=list[dict[str, Any]])


class Mapped(Shown):
    """The id by which later items refer to this one."""

    client_id: str | None
    id: int


class ItemError(Shown):
    """An item that was not stored; the rest of its batch was."""

    kind: str
    index: int
    client_id: str | None
    error: str


class IngestAnswer(Shown):
    """Ids of the stored items, in the order in which they were sent."""

    training_id: int | None = None
    tasks: list[Mapped] = Field(default_factory=list[Mapped])
    validators: list[Mapped] = Field(default_factory=list[Mapped])
    environments: list[Mapped] = Field(default_factory=list[Mapped])
    steps: list[Mapped] = Field(default_factory=list[Mapped])
    baselines: list[Mapped] = Field(default_factory=list[Mapped])
    evals: list[Mapped] = Field(default_factory=list[Mapped])
    rollouts: list[Mapped] = Field(default_factory=list[Mapped])
    turns: list[Mapped] = Field(default_factory=list[Mapped])
    actions: list[Mapped] = Field(default_factory=list[Mapped])
    observations: list[Mapped] = Field(default_factory=list[Mapped])
    validations: list[Mapped] = Field(default_factory=list[Mapped])
    errors: list[ItemError] = Field(default_factory=list[ItemError])
