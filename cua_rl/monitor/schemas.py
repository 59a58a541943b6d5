"""Responses of the read API as pydantic models, from which the web app's types are generated.

A run is one training. `run_id` is opaque: `7`, or `folder.7` if several databases are shown. Times are ISO 8601 in
UTC, durations are in seconds; non-finite numbers are null.
"""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from cua_rl.events import Phase
from cua_rl.reporting.alerts import AlertKind
from cua_rl.types.json_values import JsonDict

Item = TypeVar("Item")
RunStatus = Literal["running", "completed", "failed", "cancelled"]
StepStatus = Literal["rollouts", "training", "running", "completed", "failed", "cancelled"]


class Shown(BaseModel):
    """Base of all responses; every field is present, null if unknown."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True, from_attributes=True)


class Page(Shown, Generic[Item]):
    """One page of a list; request the next one with `cursor=next_cursor`, which is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


class Rate(Shown):
    """A success rate with its 95 % interval: the mean over tasks of the share of rollouts that succeeded.

    `rate` is null while nothing has ended.
    """

    num_successes: int
    num_rollouts: int
    rate: float | None
    low: float
    high: float
    num_independent: float = Field(description="independent trials that would have this interval")
    num_lost_tasks: int = Field(
        description="tasks whose attempts were all lost to faults: failed at the lower end, solved at the upper end"
    )


class FaultBounds(Shown):
    """Success rate of first attempts if all that ended in a fault had failed (`worst`) or had succeeded (`best`)."""

    num_faults: int
    worst: float
    best: float


class RunningStep(Shown):
    """The running step and its ended groups. Short rollouts end first, so this is not the step's success."""

    step: int
    num_groups: int
    num_ended_groups: int
    success: Rate


class AlertShown(Shown):
    """Something for which a run that goes on should be looked at."""

    kind: AlertKind
    message: str


class NamedRun(Shown):
    """What a run is called."""

    run_id: str
    run_name: str
    alias: str | None = Field(default=None, description="what people call it, shown in place of its name")


class RunSummary(NamedRun):
    """A run as a list of runs shows it."""

    is_pinned: bool = Field(default=False, description="it stands first in the list of runs")
    log_path: str
    tags: list[str] = Field(default=[], description="that people gave the run")
    alerts: list[AlertShown] = Field(default=[], description="none once the run has ended")
    project: str | None = Field(description="project whose token sent the run, null for a run of this database")
    model_name: str | None
    status: RunStatus
    is_alive: bool = Field(description="running, with a heartbeat in the last minute")
    error: str | None
    num_completed_steps: int
    total_steps: int
    progress: float = Field(description="share of completed steps, 0 to 1; the running step counts by its ended groups")
    step_time_s: float | None = Field(
        description="time from step end to step end, mean of the last ten of this attempt, without evaluations"
    )
    eta_s: float | None = Field(
        description="estimated time until the run is done, evaluations included; null unless the run is alive and has "
        "ended a step since it was started or resumed"
    )
    eta_is_lower_bound: bool = Field(description="no evaluation shows yet how long those that are owed take")
    elapsed_s: float = Field(description="until its end; until now if it is alive, else until its last heartbeat")
    started_at: datetime
    ended_at: datetime | None
    heartbeat_at: datetime
    num_attempts: int = Field(description="how often the run was started or resumed")
    success_rate: float | None = Field(description="of the latest finished step")
    reward_mean: float | None = Field(description="of the latest finished step")
    success_step: int | None = Field(description="the latest finished step")
    running_step: RunningStep | None = Field(description="null unless running")
    baseline: Rate | None = Field(description="success on held-out tasks before training")
    baseline_step: int | None
    last_eval: Rate | None = Field(description="success on held-out tasks, latest evaluation")
    last_eval_step: int | None
    sparkline: list[float | None] = Field(description="success rate over the finished steps, at most 60 points")
    curve_ends: list[int] = Field(
        description="steps after which the run went on with settings that make later results another curve"
    )


class RunList(Page[RunSummary]):
    num_runs: int = Field(description="all that fit search and status")


class MetricInfo(Shown):
    """A metric of the run with its meaning and latest value."""

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
    fault_bounds: FaultBounds | None = Field(description="null without faults, and until the evaluation is completed")
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
    """A run with its configuration (secrets masked), metrics, evaluations, checkpoints and status history."""

    config: JsonDict
    settings: list["ConfigRow"] = Field(description="the configuration as rows, nested settings with dots")
    first_step: int
    num_rollouts: int = Field(description="whether or not they have ended, those of evaluations included")
    num_running_rollouts: int = Field(description="0 unless the run is alive")
    rows_bytes: int = Field(
        description="rollouts and turns in the database, estimated from about 40 rollouts if it has more"
    )
    screenshots_bytes: int = Field(description="their screenshots, shared ones in parts, estimated in the same way")
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
    num_steps: int = Field(description="steps that were measured, of which `steps` is an even choice")
    ended_at: list[datetime | None]
    tokens: list[float | None] = Field(description="sampled in training until the end of each of `steps`")
    series: dict[str, list[float | None]]
    success: list[SuccessPoint] = Field(description="of finished training steps, with intervals")
    evaluations: list[SuccessPoint]


class ConfigRow(Shown):
    """One setting in all compared runs, in the requested order; null if a run does not have it."""

    key: str
    values: list[Any]
    is_different: bool


class RunComparison(Shown):
    runs: list[RunSummary]
    config: list[ConfigRow]
    unknown: list[str] = Field(description="requested ids that no run has")


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


class Benchmarks(Shown):
    """The newest evaluations that can be read."""

    benchmarks: list[Benchmark]
    num_others: int = Field(description="further files of results that are older, too large or not readable")


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
    """Permissions of the client."""

    can_read: bool
    can_write: bool
    must_sign_in: bool = Field(description="true if reading requires a token")
    version: str


class OverrideRequest(BaseModel):
    """A verdict: success, reward or both; neither withdraws earlier verdicts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    success: bool | None = None
    reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    reason: str = Field(min_length=1, max_length=2000)
    actor: str = Field(min_length=1, max_length=200)


class Note(Shown):
    """A tag or a text that a person gave a run, a rollout or a turn."""

    note_id: int
    turn_index: int | None = Field(description="counted from 0; null if it is about the whole run or rollout")
    tag: str | None
    text: str | None
    actor: str
    created_at: datetime


class RunMark(BaseModel):
    """What people call a run, and whether it stands first in the list of runs."""

    model_config = ConfigDict(extra="forbid")

    alias: str | None = Field(default=None, min_length=1, max_length=120, pattern=r"^\S(.*\S)?$")
    is_pinned: bool = False


class SignIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: str = Field(min_length=1, max_length=500)


class Problem(Shown):
    """Every error response has this format."""

    detail: Any
