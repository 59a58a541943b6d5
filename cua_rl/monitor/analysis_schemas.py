"""Responses with the results of recipes about a run: comparisons of a suite, repeated steps, answers of checkpoints."""

from datetime import datetime

from pydantic import Field

from cua_rl.database.analysis_models import AnalysisKind
from cua_rl.monitor.schemas import Shown
from cua_rl.reporting.comparison import PairRow
from cua_rl.types.json_values import JsonDict


class AnalysisPlace(Shown):
    """What of a run was analysed: a step, a turn of a rollout, or the run as a model of a suite."""

    kind: AnalysisKind
    step: int | None
    rollout_id: str | None
    turn_index: int | None


class SuiteModel(Shown):
    name: str
    run_id: str | None = Field(description="null if its run was deleted")


class SuiteComparison(Shown):
    """A checkpoint, second of the pair, against the one that the suite had accepted."""

    at: datetime
    candidate: SuiteModel
    accepted: SuiteModel
    pair: PairRow
    p_value: float = Field(description="one-sided, of McNemar's exact test")
    is_regression: bool
    is_accepted: bool = Field(description="the checkpoint is what later ones are compared with")
    power: float = Field(description="probability with which a fall of `fall` is found")
    fall: float
    churn: float
    false_alarms: float = Field(description="probability of an alarm without a fall, at most")


class Suite(Shown):
    """A regression suite, its comparisons newest first."""

    name: str
    accepted: SuiteModel
    comparisons: list[SuiteComparison]


class Compared(Shown):
    """Numbers that were made again beside those recorded."""

    num: int = Field(description="0 if only hashes were compared")
    is_equal: bool = Field(description="bit for bit")
    largest: float | None = Field(description="largest difference")
    scale: float | None = Field(description="largest magnitude")


class Effect(Shown):
    """Mean change of the log-probability of all answers of a rollout, nats; null without such rollouts."""

    successes: float | None
    failures: float | None


class Variant(Effect):
    """One way of taking a step; the first of several is the one taken."""

    name: str
    norm: float | None
    relative_norm: float | None = Field(description="as a share of that of the update taken")
    cosine: float | None = Field(description="with the update taken; null if one of them is 0")
    gradient_cosine: float | None = Field(description="null with several optimizer steps")


class TaskEffects(Shown):
    task_id: str
    effects: list[Effect] = Field(description="one per variant")


class RolloutChanges(Shown):
    rollout_id: str
    task_id: str
    success: bool
    advantage: float | None
    changes: list[float | None] = Field(description="of the log-probability of all its answers, nats; one per variant")


class StepReplay(Shown):
    """A step made again, and with other settings."""

    at: datetime
    start: int = Field(description="the step after which the replay began")
    is_same_machine: bool
    logprob_gap: float | None = Field(description="largest difference of log-probabilities before the update, nats")
    adapter: Compared | None = Field(description="null if the run kept none")
    variants: list[Variant]
    tasks: list[TaskEffects]
    rollouts: list[RolloutChanges]


class AskedAnswer(Shown):
    """An answer as the agent reads it; its actions have coordinates in pixels of the screenshot."""

    done: str
    actions: list[JsonDict]


class AskedCheckpoint(Shown):
    name: str
    is_own: bool = Field(description="it sampled the recorded answer")
    logprob: float | None = Field(description="of the recorded answer, nats")
    mean_abs_gap: float | None = Field(description="of its tokens from the recorded log-probabilities, nats")
    num_same: int = Field(description="answers that do what the recorded one does")
    samples: list[AskedAnswer]


class AskedTurn(Shown):
    """What checkpoints make of a recorded turn, in the order in which they were asked."""

    at: datetime
    turn_index: int
    temperature: float
    logprob: float | None = Field(description="of the recorded answer as it was sampled, nats")
    num_tokens: int
    recorded: AskedAnswer
    checkpoints: list[AskedCheckpoint]
