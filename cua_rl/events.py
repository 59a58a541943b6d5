"""Events of a run: the training loop and the rollouts report them, a `Recorder` stores them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from cua_rl.tasks.task import Task
from cua_rl.types.rollout import RolloutGroup, Turn

Phase = Literal["baseline", "step", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """What rollouts belong to: the baseline (step 0), a training step (from 1), or an evaluation after that step."""

    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStarted:
    """The run starts, or resumes, at `first_step`; records of an earlier attempt from that step on are void."""

    run_name: str
    log_path: str
    config: Mapping[str, object]
    first_step: int
    total_steps: int
    kept_group_ids: tuple[str, ...] = ()
    """Ended groups of an earlier attempt that this one keeps: no completed step has trained them and this attempt will,
    or they belong to an evaluation that goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """The run ended."""

    status: Literal["completed", "failed", "cancelled"]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStarted:
    """A step or an evaluation starts, with the task instances that it will run, one group each."""

    source: RolloutSource
    tasks: tuple[Task, ...]
    group_size: int
    policy_version: int
    num_groups: int | None = None
    """Number of groups if `tasks` are not known yet (asynchronous training); None means one per task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStarted:
    """A rollout has leased its device and starts."""

    source: RolloutSource
    rollout_id: str
    group_id: str
    group_index: int
    member_index: int
    task: Task
    device_id: str
    max_turns: int
    worker: str | None = None
    """The rollout worker that runs it."""
    parent_id: str | None = None
    fork_turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTaken:
    """A rollout has taken one more turn."""

    rollout_id: str
    turn: Turn
    is_told: bool = False
    """Its parent took it: the turn came with the job, and its times are the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """All members of a group have ended. `advantages` align with `group.compared`; None in evaluations."""

    source: RolloutSource
    group: RolloutGroup
    advantages: tuple[float, ...] | None
    turn_advantages: tuple[tuple[float, ...], ...] = ()
    """Those of the turns of each rollout of `group.compared`; empty, all or one, if every turn has its rollout's."""
    replaced_by: Task | None = None
    """The task of an additional group that the step runs because this group is constant."""

    def of_turns(self, index: int) -> tuple[float, ...]:
        """The advantages of the turns of a compared rollout, if they have their own."""
        return self.turn_advantages[index] if self.turn_advantages else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """An asynchronous run has chosen the groups that `step` trains.

    Until then a group belongs to the last step that may train it, afterwards to the step that does.
    """

    step: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The optimizer step is done. `datums_sha256` identifies the training data bit for bit."""

    step: int
    policy_version: int
    datums_sha256: str
    num_datums: int
    training_logprobs: Mapping[str, tuple[tuple[int, tuple[float, ...]], ...]]
    """Per rollout id: (turn index, the trainer's log-probabilities of that turn's sampled tokens)."""
    metrics: Mapping[str, float]
    trained_on: str | None = None
    """The machine that trained it."""
    adapter_sha256: str | None = None
    """Of the adapter's weights after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """An evaluation is done."""

    source: RolloutSource
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint from which a run can resume is on disk."""

    step: int
    state_path: str
    sampler_path: str


Event = (
    TrainingStarted
    | TrainingEnded
    | SourceStarted
    | RolloutStarted
    | TurnTaken
    | GroupEnded
    | BatchTaken
    | StepTrained
    | EvaluationEnded
    | CheckpointSaved
)


class Recorder(Protocol):
    """Stores events. `record` returns immediately unless its bounded queue is full; no event is lost."""

    async def record(self, event: Event) -> None: ...

    async def flush(self) -> None:
        """Wait until everything recorded so far is durable."""
        ...


class NoRecorder:
    """Discards events."""

    async def record(self, event: Event) -> None:
        return

    async def flush(self) -> None:
        return
