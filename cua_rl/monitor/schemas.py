"""What the read API answers, as pydantic models: the web app's types are generated from them.

A run is one training. `run_id` is opaque text that is part of addresses: `7`, or `folder.7` where several databases are
shown. Times are ISO 8601 in UTC, durations seconds; a number that is not finite is null.
"""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from cua_rl.types import JsonDict

Item = TypeVar("Item")
Phase = Literal["baseline", "step", "eval"]
RunStatus = Literal["running", "completed", "failed", "cancelled"]
StepStatus = Literal["rollouts", "training", "running", "completed", "failed", "cancelled"]


class Shown(BaseModel):
    """Base of everything that is answered; every field is there, null if nothing is known."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class Page(Shown, Generic[Item]):
    """A part of a list; ask again with `cursor=next_cursor` for what follows, null at its end."""

    items: list[Item]
    next_cursor: str | None = None


class Rate(Shown):
    """A success rate with its 95 % Wilson interval; `rate` is null while nothing has ended."""

    num_successes: int
    num_rollouts: int
    rate: float | None
    low: float
    high: float


class RunningStep(Shown):
    """The step under way and its groups that have ended: short rollouts end first, so this is no step's success."""

    step: int
    num_groups: int
    num_ended_groups: int
    success: Rate


class RunSummary(Shown):
    """A run as a list of runs shows it."""

    run_id: str
    run_name: str
    log_path: str
    project: str | None = Field(description="project whose token sent the run, null for a run of this database")
    model_name: str | None
    status: RunStatus
    is_alive: bool = Field(description="running, with a sign of life in the last minute")
    error: str | None
    num_completed_steps: int
    total_steps: int
    progress: float = Field(description="share of steps that are done, 0 to 1; a step counts by its ended groups")
    step_time_s: float | None = Field(description="median of the last ten steps")
    eta_s: float | None = Field(
        description="expected time until the last step is done; null unless the run is alive and steps are left"
    )
    elapsed_s: float = Field(description="until its end; until now if it is alive, else until it fell silent")
    started_at: datetime
    ended_at: datetime | None
    heartbeat_at: datetime
    num_attempts: int = Field(description="how often the run was started or resumed")
    success_rate: float | None = Field(description="of the latest finished step")
    reward_mean: float | None = Field(description="of the latest finished step")
    success_step: int | None = Field(description="the latest finished step")
    running_step: RunningStep | None = Field(description="null unless running")
    baseline: Rate | None = Field(description="success on held-out tasks before training")
    last_eval: Rate | None = Field(description="success on held-out tasks, latest evaluation")
    last_eval_step: int | None
    sparkline: list[float | None] = Field(description="success rate over the finished steps, at most 60 points")


class MetricInfo(Shown):
    """A metric that the run has, what it means and its latest value."""

    name: str
    meaning: str | None
    area: str
    last: float | None


class CheckpointInfo(Shown):
    step: int
    state_path: str
    sampler_path: str
    created_at: datetime


class Evaluation(Shown):
    """An evaluation (phase eval) or the evaluation of the untrained model (phase baseline)."""

    phase: Literal["baseline", "eval"]
    step: int
    status: RunStatus
    policy_version: int
    group_size: int
    num_groups: int
    num_ended_groups: int
    success: Rate
    by_category: dict[str, Rate]
    by_difficulty: dict[str, Rate]
    reward_mean: float | None
    metrics: dict[str, float | None]
    started_at: datetime
    ended_at: datetime | None


class StatusChange(Shown):
    old_status: str | None
    new_status: str
    changed_at: datetime


class Run(RunSummary):
    """A run with its configuration (secrets masked) and what hangs on it."""

    config: JsonDict
    first_step: int
    num_rollouts: int = Field(description="rollouts of ended groups, those of evaluations included")
    num_running_rollouts: int = Field(description="0 unless the run is alive")
    metrics: list[MetricInfo]
    evaluations: list[Evaluation]
    checkpoints: list[CheckpointInfo]
    history: list[StatusChange]


class SuccessPoint(Rate):
    """Success of one step's rollouts, or of one evaluation."""

    phase: Phase
    step: int


class MetricSeries(Shown):
    """Metrics by name, one value per entry of `steps`; null where a step did not measure it."""

    run_id: str
    steps: list[int]
    ended_at: list[datetime | None]
    series: dict[str, list[float | None]]
    success: list[SuccessPoint] = Field(description="of finished training steps, with intervals")
    evaluations: list[SuccessPoint]


class FailureCounts(Shown):
    """How rollouts that have ended failed, counted per step; every list aligns with `steps`."""

    steps: list[int]
    num_rollouts: list[int]
    num_successes: list[int]
    kinds: dict[str, list[int]] = Field(
        description="rollouts without success: wrong_final_state if the agent said that it was done, else what ended it"
    )
    turn_failures: dict[str, list[int]] = Field(description="turns whose answer could not be understood, by kind")


class Failures(Shown):
    """What went wrong in training, and in evaluations, where step 0 is the baseline."""

    training: FailureCounts
    evaluations: FailureCounts
    errors: list["ErrorCount"] = Field(description="most frequent messages of infrastructure faults, of both")


class ErrorCount(Shown):
    message: str
    count: int
    last_rollout_id: str


class ConfigRow(Shown):
    """One setting in all compared runs, in the order in which they were asked for; null where a run lacks it."""

    key: str
    values: list[Any]
    is_different: bool


class RunComparison(Shown):
    runs: list[RunSummary]
    config: list[ConfigRow]


class TimelineItem(Shown):
    """A step, an evaluation or the baseline, in the order of training."""

    phase: Phase
    step: int
    status: StepStatus
    policy_version: int
    progress: float
    num_groups: int
    num_ended_groups: int
    success: Rate
    reward_mean: float | None
    started_at: datetime
    rollouts_ended_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None


class Benchmark(Shown):
    """An evaluation of models on a task set, from the results.json of recipes.evaluate."""

    name: str
    title: str | None
    path: str
    written_at: datetime
    results: JsonDict


LiveKind = Literal["hello", "reset", "run", "step", "eval", "group", "rollout", "turn", "override"]


class LiveEvent(Shown):
    """Something changed; fields that do not apply are left out."""

    event_id: str
    kind: LiveKind
    run_id: str | None = None
    phase: Phase | None = None
    step: int | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    turn_index: int | None = None
    status: str | None = None


class Session(Shown):
    """What whoever asks may do."""

    can_read: bool
    can_write: bool
    must_sign_in: bool = Field(description="true if reading needs a token here")
    version: str


class OverrideRequest(BaseModel):
    """A verdict: success, reward or both; neither takes earlier verdicts back."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    success: bool | None = None
    reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    reason: str = Field(min_length=1, max_length=2000)
    actor: str = Field(min_length=1, max_length=200)


class SignIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: str = Field(min_length=1, max_length=500)


class Problem(Shown):
    """Every refusal has this form."""

    detail: Any
