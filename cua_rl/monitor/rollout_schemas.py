"""Responses of the read API about steps, groups, rollouts, turns and tasks."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from cua_rl.monitor.schemas import FaultBounds, NamedRun, Phase, Rate, RunStatus, Shown, StatusChange, StepStatus
from cua_rl.types.json_values import JsonDict


class RolloutCell(Shown):
    """A rollout in a grid or a list."""

    rollout_id: str
    member_index: int
    status: RunStatus
    stop_reason: str | None
    success: bool | None = Field(description="the result of the task's validator")
    reward: float | None
    advantage: float | None
    num_turns: int
    max_turns: int | None
    started_at: datetime
    duration_s: float | None
    device_id: str | None
    error: str | None
    parent_id: str | None = Field(description="the rollout of the group from which it went on, null if none")
    fork_turn: int = Field(description="turns before this index are its parent's: told again, not sampled")
    override_success: bool | None = Field(description="a person's verdict, null without one")
    override_reward: float | None


class Replay(Shown):
    """A rollout of an earlier step that was trained on with this group."""

    rollout_id: str
    step: int | None
    reward: float | None
    advantage: float


class GroupSummary(Shown):
    """Rollouts of one task instance."""

    group_id: str
    group_index: int
    task_id: str
    seed: int
    instruction: str | None
    category: str | None
    difficulty: str | None
    status: RunStatus
    num_rollouts: int | None = Field(description="members with a reward, null while the group runs")
    num_faulty: int | None
    num_successes: int | None
    reward_mean: float | None
    reward_std: float | None
    is_constant: bool = Field(description="all rewards are equal, so the group gives no training signal")
    started_at: datetime
    ended_at: datetime | None
    rollouts: list[RolloutCell]
    replays: list[Replay]


class SourceRef(Shown):
    """A step, an evaluation or the baseline of the same run."""

    phase: Phase
    step: int


class SourceDetail(NamedRun):
    """A step or an evaluation with its groups x rollouts grid."""

    is_run_alive: bool = Field(description="running, with a heartbeat in the last minute")
    phase: Phase
    step: int
    status: StepStatus
    policy_version: int
    trained_policy_version: int | None
    group_size: int
    num_groups: int
    num_ended_groups: int
    num_datums: int | None
    datums_sha256: str | None
    success: Rate
    fault_bounds: FaultBounds | None = Field(description="of a completed evaluation with faults")
    metrics: dict[str, float | None]
    started_at: datetime
    rollouts_ended_at: datetime | None
    ended_at: datetime | None
    previous: SourceRef | None = Field(description="the previous step, or evaluation including the baseline")
    next: SourceRef | None
    groups: list[GroupSummary]


class ClockTurn(Shown):
    """A turn on the time axis of a group."""

    turn_index: int
    started_s: float = Field(description="since the start of the group's first rollout")
    duration_s: float = Field(description="whole turn: request, action, screenshot")
    action: JsonDict | None
    failure_kind: str | None
    action_error: str | None
    before_sha256: str | None
    after_sha256: str | None


class ClockRollout(RolloutCell):
    started_s: float = Field(description="since the start of the group's first rollout")
    turns: list[ClockTurn]


class GroupDetail(NamedRun):
    """The rollouts of a group side by side, on a common time axis."""

    is_run_alive: bool = Field(description="running, with a heartbeat in the last minute")
    phase: Phase
    step: int
    group: GroupSummary
    duration_s: float
    rollouts: list[ClockRollout]


class Count(Shown):
    name: str
    count: int


class CheckCount(Shown):
    """What validators expected and what they read instead, or as well."""

    query: str
    expected: str
    actual: str
    success: bool
    count: int


class RolloutItem(RolloutCell):
    """A rollout in a list across groups."""

    run_id: str
    phase: Phase
    step: int
    group_id: str
    task_id: str
    seed: int
    max_gap: float | None = Field(description="largest |trainer - sampler| log-probability; null if not trained")
    num_prompt_tokens: int | None = Field(description="of all its turns, as what follows; null until it has ended")
    num_cached_tokens: int | None
    num_sampled_tokens: int | None
    num_trained_tokens: int | None = Field(description="null if none was trained on")
    sampling_s: float | None = Field(description="of its requests to the model")
    device_s: float | None = Field(description="that it had its device for; null if it never had one")
    instruction: str | None = None
    given_tags: list[str] = Field(default=[], description="by people, to it or its turns; only in lists")
    last_sha256: str | None = Field(default=None, description="the latest screenshot; only in lists")
    last_action: JsonDict | None = Field(default=None, description="the action on it, null if it shows the result")


class ScreenshotRef(Shown):
    """A screenshot; its bytes are at /api/screenshots/{sha256}."""

    sha256: str
    width_px: int | None
    height_px: int | None


class ToolCallShown(Shown):
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it")


class TurnDetail(Shown):
    """A turn without its tokens, which are at …/turns/{turn_index}/tokens."""

    turn_index: int
    response_id: str
    policy_version: int = Field(description="the adapter that sampled the turn")
    trained_at_step: int | None = Field(description="the step that trained on the turn")
    stop: str
    text: str = Field(description="the sampled text without the end-of-turn token")
    thinking: str | None
    answer: str = Field(description="text outside thinking and tool calls")
    tool_calls: list[ToolCallShown]
    failure_kind: str | None
    failure_message: str | None
    action: JsonDict | None = Field(description="type and values, coordinates in pixels of the screenshot before")
    action_error: str | None
    before: ScreenshotRef | None
    after: ScreenshotRef | None
    request: JsonDict = Field(description="as the agent sent it; images are sha256:<hex>")
    prompt_matches_renderer: bool
    num_prompt_tokens: int
    cached_tokens: int
    num_sampled_tokens: int
    logprob_mean: float | None = Field(description="mean sampling log-probability")
    gap_mean_abs: float | None = Field(description="mean |trainer - sampler| log-probability; null if not trained")
    started_at: datetime
    started_s: float = Field(description="since the rollout began")
    duration_s: float = Field(description="of the request to the model")
    durations_s: dict[str, float | None] = Field(description="of the turn's stages")


class PromptPart(Shown):
    """A chunk of the prompt."""

    kind: Literal["text", "image"]
    num_tokens: int
    text: str | None
    sha256: str | None


class TurnTokens(Shown):
    """Sampled tokens; all lists align. Bytes of a character that `texts` splits are shown in hex, such as \\xf0."""

    turn_index: int
    policy_version: int
    advantage: float | None
    tokens: list[int]
    texts: list[str] | None = Field(description="null if the run's tokenizer is not on this machine")
    sampling_logprobs: list[float | None]
    training_logprobs: list[float | None] | None
    prompt: list[PromptPart]
    prompt_token_ids: list[int]


class ValidationShown(Shown):
    query: str
    expected: str
    actual: str
    success: bool
    duration_s: float


class JudgeVoteShown(Shown):
    """One answer of a judge."""

    success: bool | None = Field(description="null if the endpoint failed or the answer was malformed")
    reason: str
    score: float | None
    error: str | None
    is_malformed: bool
    text: str = Field(description="the answer as it came")
    duration_s: float | None
    num_prompt_tokens: int
    num_answer_tokens: int


class JudgementShown(Shown):
    """A judge's result for the rollout."""

    model: str
    prompt: str
    prompt_sha256: str
    screenshots: str
    decides: bool = Field(description="false if the task has a validator, which then decides")
    success: bool | None = Field(description="null if no majority of the votes agrees")
    score: float | None
    reason: str
    agreement: float | None = Field(description="share of the votes that agree with the verdict")
    votes: list[JudgeVoteShown]
    num_prompt_tokens: int
    num_answer_tokens: int
    cost_usd: float | None = Field(description="null if no prices were set")
    duration_s: float | None


class DeviceShown(Shown):
    """The device that the rollout used."""

    device_id: str
    status: str
    error: str | None
    started_at: datetime
    ended_at: datetime | None


class Override(Shown):
    """A person's verdict on a rollout; the newest one counts. Training data do not change."""

    override_id: int
    success: bool | None = Field(description="null withdraws earlier verdicts")
    reward: float | None
    reason: str
    actor: str
    created_at: datetime


class Verdict(Override):
    """A person's verdict with what the run itself recorded of the rollout."""

    rollout_id: str
    task_id: str
    seed: int
    phase: Phase
    step: int
    validator_success: bool | None
    trained_reward: float | None


class Rollout(RolloutItem):
    """A rollout with all its turns."""

    run_name: str
    alias: str | None = Field(description="what people call the run")
    is_run_alive: bool = Field(description="running, with a heartbeat in the last minute")
    group_index: int
    category: str | None
    difficulty: str | None
    tags: list[str]
    answer: str | None
    reward_parts: dict[str, float | None] | None
    ended_at: datetime | None
    validation: ValidationShown | None
    judgement: JudgementShown | None = Field(description="null if no judge was asked")
    device: DeviceShown | None
    worker: str | None = Field(description="the rollout worker that ran it, null for the run's own process")
    pruned_at: datetime | None = Field(description="when the screenshots that no other rollout shows were removed")
    overrides: list[Override]
    history: list[StatusChange]
    replayed_at_steps: list[int]
    siblings: list[RolloutCell] = Field(description="members of the group in order, this one included")
    turns: list[TurnDetail]


class TaskStats(Shown):
    """Success of one task in a run: in training steps, and in the latest evaluation with it."""

    task_id: str
    instruction: str | None
    category: str | None
    difficulty: str | None
    num_groups: int = Field(description="in training steps; 0 for a task that is only evaluated")
    num_failed_groups: int = Field(description="groups without any success")
    success: Rate
    recent: Rate = Field(description="in the last quarter of the run's steps")
    held_out: Rate = Field(description="in the latest evaluation with the task, including the baseline")
    held_out_in: SourceRef | None = Field(description="that evaluation; null without one")
    last_step: int | None


class TaskPoint(Rate):
    phase: Phase
    step: int
    reward_mean: float | None


class TaskInstance(Shown):
    """One seed of a task."""

    seed: int
    instruction: str | None
    success: Rate
    last_step: int | None


class TaskDetail(NamedRun):
    """Success of one task over time, and its failures."""

    task_id: str
    instruction: str | None
    category: str | None
    difficulty: str | None
    tags: list[str]
    max_turns: int | None
    training: Rate = Field(description="in all training steps")
    baseline: Rate | None = Field(description="before training, null if the task is not evaluated")
    last_eval: Rate | None = Field(description="latest finished evaluation with the task, null if there is none")
    last_eval_step: int | None
    curve_ends: list[int] = Field(description="as of the run")
    history: list[TaskPoint] = Field(description="training steps, then evaluations, each in order")
    examined: SourceRef | None = Field(
        description="the evaluation to which instances and failures belong; null means all training steps"
    )
    instances: list[TaskInstance] = Field(description="hardest first, as many as asked for")
    num_instances: int = Field(description="all of them")
    stop_reasons: list[Count] = Field(description="of rollouts that failed")
    failed_checks: list[CheckCount] = Field(description="the most frequent, of rollouts that failed")
    num_failed_checks: int = Field(description="different ones in all")
    turn_failures: list[Count]
    failed_rollouts: list[RolloutItem] = Field(description="the latest, as many as asked for")
    num_failed_rollouts: int = Field(description="all of them")
