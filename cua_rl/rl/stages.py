"""Shared by both loops: their settings and components, and the stages around the algorithm.

A stage scores and records a group, records a step, saves a checkpoint or evaluates. Steps count from 1; an evaluation
or checkpoint "at k" is after step k.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from cua_rl.environments.harness_world import HARNESS_ID
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import CheckpointSaved, GroupEnded, Phase, Recorder, RolloutSource, StepTrained
from cua_rl.metrics import merge_metrics
from cua_rl.reporting.comparison import EvalResult
from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.curriculum import Memory, curriculum_metrics, replay_metrics
from cua_rl.rl.datums import Batch, build_batch, datums_sha256, logprobs_by_turn
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rl.train_step import Trainer, TrainStepResult
from cua_rl.rollout.group import Runner
from cua_rl.tasks.task import Task
from cua_rl.training.folders import ADAPTER_WEIGHTS, file_sha256
from cua_rl.types.rollout import AdapterRef, RolloutGroup, SamplingParams, StopReason

logger = logging.getLogger(__name__)

_OUTLIER_SPREADS = 100.0  # distance from the median, in median distances of at least 1


class TaskStream(Protocol):
    """Training tasks. `batch` depends on its number and on recorded outcomes at most, so a resumed run sees the tasks
    that the uninterrupted run would have seen. Batches count from 0: step 1 draws batch 0.
    """

    def batch(self, number: int, num_tasks: int) -> list[Task]: ...


class Policy(Protocol):
    """The policy between trainer and sampler; `served_policy.ServedPolicy` says what the methods do."""

    async def publish(self, step: int) -> AdapterRef: ...

    async def save(self, step: int) -> SavedPolicy: ...

    async def serve(self, saved: SavedPolicy) -> AdapterRef: ...

    def hold(self, adapter: AdapterRef) -> AbstractContextManager[None]: ...

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]: ...


class StepLog(Protocol):
    """Output for people who follow the run: metric files and the progress display."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_group(self, index: int, rewards: Sequence[float]) -> None: ...

    def log_evaluation(self, phase: Phase, step: int, result: EvalResult) -> None: ...


@dataclass
class Clock:
    """Seconds per named phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def time(self, phase: str) -> Generator[None]:
        """Measure the block as `phase`."""
        start = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` for every phase measured."""
        return {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedEvaluation:
    """An evaluation of `adapter`, the policy after `step` steps."""

    phase: Phase
    step: int
    adapter: AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The configuration of a loop, and where this attempt begins."""

    config: LoopConfig
    params: SamplingParams
    image_token_id: int
    first_step: int = 1
    """The first step to train: 1, or the step after the checkpoint that the run resumes from."""
    num_tasks: int = 0
    """Training tasks, one pass over which is an epoch; 0 if they are not counted."""
    begins_curve: bool = False
    """Whether a resumed run has other tasks or evaluations than before, so that it needs a new baseline."""
    owed_evaluations: tuple[WantedEvaluation, ...] = ()
    """Evaluations that an earlier attempt had due when it died."""
    kept_groups: Mapping[int, RolloutGroup] = field(default_factory=dict[int, RolloutGroup])
    """Groups of a synchronous run's first step that an earlier attempt has sampled, by their index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The components that a loop connects."""

    tasks: TaskStream
    runner: Runner
    trainer: Trainer
    policy: Policy
    evaluator: Evaluator | None
    recorder: Recorder
    log: StepLog
    memory: Memory = field(default_factory=Memory)
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    """Metrics of devices, rollout workers and model servers since the last call."""


def find_kept(settings: LoopSettings, step: int, task: Task, index: int) -> RolloutGroup | None:
    """The group that an earlier attempt has sampled for this place of a synchronous step."""
    kept = settings.kept_groups.get(index) if step == settings.first_step else None
    return kept if kept is not None and (kept.task_id, kept.seed) == (task.task_id, task.seed) else None


async def score_and_record(
    settings: LoopSettings,
    parts: LoopParts,
    source: RolloutSource,
    group: RolloutGroup,
    replaced_by: Task | None = None,
    *,
    first_index: int = 0,
) -> ScoredGroup:
    """Score and record a group; the step's first `num_groups_to_log`, from `first_index` on, are also shown."""
    # in a thread: comparing the states of turns may have to decode their screenshots
    scored = await asyncio.to_thread(score_group, group, settings.config.advantages, settings.config.credit)
    place = group.index - first_index
    if place < settings.config.num_groups_to_log:
        parts.log.log_group(place, group.rewards)
        rewards = [round(reward, 3) for reward in group.rewards]
        logger.info("step=%d group=%d task=%s rewards=%s", source.step, group.index, group.task_id, rewards)
    if group.group_id not in {kept.group_id for kept in settings.kept_groups.values()}:  # those are on record
        await parts.recorder.record(
            GroupEnded(
                source=source,
                group=group,
                advantages=scored.advantages,
                turn_advantages=scored.turn_advantages,
                replaced_by=replaced_by,
            )
        )
    return scored


async def build_step_batch(settings: LoopSettings, groups: Sequence[ScoredGroup]) -> Batch:
    """Build the datums of a step, in a thread: they hold every token and image of its rollouts."""
    keeps_constant = settings.config.has_kl_term
    batch = await asyncio.to_thread(build_batch, groups, settings.image_token_id, keeps_constant=keeps_constant)
    _warn_of_split_rollouts(groups, batch)
    _warn_of_outliers([scored.group for scored in groups])
    return batch


def _warn_of_outliers(groups: Sequence[RolloutGroup]) -> None:
    """A reward far from all others decides a step; usually it is a bug in a harness or a reward function."""
    rewards = [(one.reward.total, one) for group in groups for one in group.rollouts if one.reward is not None]
    middle = median(reward for reward, _ in rewards) if rewards else 0.0
    gaps = [abs(reward - middle) for reward, _ in rewards]
    if max(gaps, default=0.0) > _OUTLIER_SPREADS * max(1.0, median(gaps or [0.0])):
        reward, one = rewards[gaps.index(max(gaps))]
        logger.warning(
            "a reward of %g is far from the median %g: correct it, or set reward_clip (task=%s rollout_id=%s)",
            *(reward, middle, one.task_id, one.rollout_id),
        )


def _warn_of_split_rollouts(groups: Sequence[ScoredGroup], batch: Batch) -> None:
    """A harness costs more than it needs to if its prompts do not extend each other, which is visible nowhere else."""
    compared = [one for scored in groups for one in scored.group.compared]
    # in a worker, its name stands before the device's
    ids = {one.rollout_id for one in compared if (one.device_id or "").rpartition("/")[2] == HARNESS_ID}
    num_sequences = sum(datum.rollout_id in ids for datum in batch.datums)
    num_rollouts = len({datum.rollout_id for datum in batch.datums} & ids)
    if num_sequences > num_rollouts:
        logger.warning(
            "%d rollouts of the harness are %d training sequences, because a prompt does not begin with the one before "
            "and its answer: does the program drop screenshots, edit its history, or send a probe (CUA-Train: no)?",
            num_rollouts,
            num_sequences,
        )


def report_crashes(step: int, groups: Sequence[RolloutGroup]) -> None:
    """An agent that fails after an answer has given up; if most do, the agent is broken, and rewards mean nothing."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    # if its time ran out, the error says what the policy did to the device
    crashed = [rollout for rollout in rollouts if rollout.error and rollout.stop_reason != StopReason.MAX_TIME]
    if 2 * len(crashed) > len(rollouts):
        logger.error(
            "step=%d expected agents that end by themselves, got %d of %d rollouts whose agent failed, which counts as "
            "giving up; stop the run, read logs/agents, fix the agent and begin again. The most frequent failure: %s",
            step,
            len(crashed),
            len(rollouts),
            Counter(rollout.error for rollout in crashed).most_common(1)[0][0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step that has trained, or found nothing to train on."""

    step: int
    groups: Sequence[ScoredGroup]
    batch: Batch
    result: TrainStepResult
    old_version: int
    """The policy version that the step began with."""
    adapter: AdapterRef | None
    """The policy that it made; None if it trained nothing."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the loop itself."""

    @property
    def new_version(self) -> int:
        return self.old_version if self.adapter is None else self.adapter.policy_version


async def record_step(settings: LoopSettings, parts: LoopParts, trained: TrainedStep, clock: Clock) -> None:
    """Remember the outcomes of a step's groups; record and log the step with its metrics."""
    groups = [scored.group for scored in trained.groups]
    report_crashes(trained.step, groups)
    sampled = rollout_metrics(groups)
    step_s, train_s = max(1e-9, clock.seconds["step"]), clock.seconds.get("train")
    speed = {
        "time/tokens_per_s": sampled["rollout/sampled_tokens"] / step_s,
        "time/rollouts_per_hour": 3600 * sampled["rollout/num_rollouts"] / step_s,
    }
    if train_s:
        speed["time/trained_tokens_per_s"] = trained.batch.metrics["rollout/datum_tokens"] / train_s
    metrics = merge_metrics(
        sampled,
        curriculum_metrics(groups, settings.config.groups_per_batch),
        replay_metrics(groups, trained.old_version),
        trained.batch.metrics,
        trained.result.metrics,
        trained.metrics,
        await parts.memory.remember(trained.step, groups),
        parts.device_metrics(),
        clock.metrics(),
        speed,
        {"progress/policy_version": float(trained.new_version)},
        epoch_metrics(trained.step, settings.config.groups_per_batch, settings.num_tasks),
    )
    datums, logprobs = trained.batch.datums, trained.result.training_logprobs
    weights = None if trained.adapter is None else trained.adapter.path / ADAPTER_WEIGHTS
    await parts.recorder.record(
        StepTrained(
            step=trained.step,
            policy_version=trained.new_version,
            # in a thread: hashing all tokens and images of a step takes too long for the event loop
            datums_sha256=await asyncio.to_thread(datums_sha256, datums),
            num_datums=len(datums),
            training_logprobs=await asyncio.to_thread(
                logprobs_by_turn, datums, logprobs, leave_out=trained.batch.replayed_ids
            ),
            metrics=metrics,
            trained_on=trained.result.trained_on,
            adapter_sha256=None if weights is None else await asyncio.to_thread(file_sha256, weights),
        )
    )
    parts.log.log_step(trained.step, metrics)


def is_checkpoint_due(settings: LoopSettings, num_steps: int) -> bool:
    """Whether a checkpoint is saved after `num_steps` steps; after the last step always."""
    if num_steps == settings.config.max_steps or (
        settings.config.save_every and num_steps % settings.config.save_every == 0
    ):
        return True
    return ends_epochs(
        num_steps, settings.config.groups_per_batch, settings.num_tasks, settings.config.checkpoints.save_every_epochs
    )


def epoch_metrics(step: int, batch_size: int, num_examples: int | None) -> dict[str, float]:
    """Passes over the data after `step` steps: 3 steps of 4 tasks out of 10 are 1.2 epochs."""
    return {"progress/epoch": step * batch_size / num_examples} if num_examples else {}


def ends_epochs(step: int, batch_size: int, num_examples: int | None, every: int) -> bool:
    """Whether `every` more passes over the data end with `step`; never if the data has no end."""
    passes = every * (num_examples or 0)
    return passes > 0 and step * batch_size // passes > (step - 1) * batch_size // passes


async def save_checkpoint(settings: LoopSettings, parts: LoopParts, num_steps: int) -> None:
    """Save everything a resume needs, in an order that a crash may interrupt anywhere.

    Every step is saved, so that a run that is stopped at any moment loses at most one: a trainer that may be started
    again has written its state anyway. A checkpoint that is not due stays until the next one, and is not recorded.
    """
    is_due = is_checkpoint_due(settings, num_steps)
    if not (is_due or settings.config.trainer.max_restarts):
        return
    await parts.recorder.flush()  # a resumed run finds everything that this checkpoint builds on in the database
    state_path, sampler_path = await parts.policy.save_checkpoint(num_steps, is_interim=not is_due)
    if is_due:
        await parts.recorder.record(
            CheckpointSaved(step=num_steps, state_path=str(state_path), sampler_path=str(sampler_path))
        )


def is_evaluation_due(settings: LoopSettings, num_steps: int) -> bool:
    """Whether the policy is evaluated after `num_steps` steps; after the last step always."""
    return num_steps == settings.config.max_steps or bool(
        settings.config.eval_every and num_steps % settings.config.eval_every == 0
    )


def first_evaluations(settings: LoopSettings, adapter: AdapterRef) -> list[WantedEvaluation]:
    """The evaluations before the first step: the baseline of a curve, or those that a killed attempt did not finish."""
    if not settings.config.evaluation.skip_baseline and (settings.first_step == 1 or settings.begins_curve):
        return [WantedEvaluation(phase="baseline", step=settings.first_step - 1, adapter=adapter)]
    return list(settings.owed_evaluations)


async def evaluate(parts: LoopParts, wanted: WantedEvaluation) -> None:
    """Measure an adapter on the held-out tasks, if there are any."""
    if parts.evaluator is not None:
        source = RolloutSource(phase=wanted.phase, step=wanted.step)
        result = await parts.evaluator.run(source, wanted.adapter)
        parts.log.log_evaluation(wanted.phase, wanted.step, result)
