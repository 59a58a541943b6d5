"""The on-policy loop: sample, score, advantages, datums, forward_backward, optim_step, publish; then the next step.

Everything waits for everything: rollouts of step k+1 begin when the adapter of step k is served. Steps count from 1;
step 0 is the model as training found it. The one exception to on-policy are replayed successes (`cua_rl/rl/replay.py`),
which are off by default.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from cua_rl.evaluation.evaluate import EvalResult
from cua_rl.events import CheckpointSaved, GroupEnded, Phase, Recorder, Source, SourceStarted, StepTrained
from cua_rl.rl.advantages import AdvantageKind, advantages_of
from cua_rl.rl.batch import Batch, build_batch, logprobs_by_turn
from cua_rl.rl.curriculum import collect_groups, curriculum_metrics
from cua_rl.rl.datums import datums_sha256
from cua_rl.rl.early_passes import EarlyPasses, early_passes
from cua_rl.rl.memory import Memory
from cua_rl.rl.replay import replay_metrics
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rl.train_step import Trainer, TrainStepSettings, scheduled_learning_rate, train_step
from cua_rl.rollout.group import GroupPlan, Runner, run_group
from cua_rl.tasks.task import Task
from cua_rl.types import AdapterRef, RolloutGroup, SamplingParams

logger = logging.getLogger(__name__)


class TaskStream(Protocol):
    """Training tasks; `batch` is a function of its number and of recorded outcomes at most, so a resumed run sees the
    tasks that the first one would have seen. Batches count from 0: step 1 draws batch 0.
    """

    def batch(self, number: int, num_tasks: int) -> list[Task]: ...


class Policy(Protocol):
    """The trained weights on their way to the sampler and to disk."""

    async def publish(self, step: int) -> AdapterRef:
        """Serve the trainer's weights after `step` training steps."""
        ...

    async def save(self, step: int) -> SavedPolicy:
        """The first half of `publish`: what must happen before the trainer's weights change again."""
        ...

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        """The second half: returns when new requests get the adapter."""
        ...

    def hold(self, adapter: AdapterRef) -> AbstractContextManager[None]:
        """Keep an adapter's folder, whatever is published meanwhile."""
        ...

    async def save_checkpoint(self, step: int) -> tuple[Path, Path]:
        """Save everything a resume needs; returns the folders of state and of sampler weights."""
        ...


class Evaluation(Protocol):
    """Measures an adapter on held-out tasks."""

    async def run(self, source: Source, adapter: AdapterRef) -> EvalResult: ...


class StepLog(Protocol):
    """Where a person follows the run: metric files and the progress display."""

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
    """What the loop needs to know. Steps count from 1; an evaluation or checkpoint "at k" is after step k."""

    first_step: int
    """The first one that is trained: 1, or the one after the checkpoint that the run goes on from."""
    max_steps: int
    groups_per_batch: int
    group_size: int
    params: SamplingParams
    advantages: AdvantageKind
    train: TrainStepSettings
    eval_every: int
    save_every: int
    image_token_id: int
    has_baseline: bool = True
    """Whether the untrained policy is evaluated."""
    num_groups_to_log: int = 0
    min_group_size: int = 1
    """A group of which faults left fewer members is not trained on."""
    max_refill_factor: int = 1
    """Groups that teach nothing are replaced until this many times `groups_per_batch` groups have run; 1 is never."""
    owed_evaluations: tuple[WantedEvaluation, ...] = ()
    """What an earlier attempt had to evaluate when it died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Who does the work."""

    tasks: TaskStream
    runner: Runner
    trainer: Trainer
    policy: Policy
    evaluator: Evaluation | None
    recorder: Recorder
    log: StepLog
    memory: Memory = field(default_factory=Memory)
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    """What happened to devices since it was last called."""


async def train(settings: LoopSettings, parts: Parts) -> None:
    """Train from `first_step` to `max_steps`, with a baseline evaluation before and a last one after."""
    adapter = await parts.policy.publish(settings.first_step - 1)
    for wanted in first_evaluations(settings, adapter):
        await evaluate(parts, wanted)
    for step in range(settings.first_step, settings.max_steps + 1):
        clock = Clock()
        with clock.time("step"):
            async with _begin_training(settings, parts) as begun:
                with clock.time("rollouts"):
                    groups = await _run_step_groups(settings, parts, step, adapter, begun)
                trained = await train_groups(settings, parts, step, groups, adapter.policy_version, clock, begun=begun)
            if trained.has_moved:
                with clock.time("publish"):
                    adapter = await parts.policy.publish(step)
        await finish_step(settings, parts, trained, adapter.policy_version, clock)
        if is_checkpoint_due(settings, step):
            await save_checkpoint(parts, step)
        if is_evaluation_due(settings, step):
            await evaluate(parts, WantedEvaluation(phase="eval", step=step, adapter=adapter))


def _begin_training(settings: LoopSettings, parts: Parts) -> AbstractAsyncContextManager[EarlyPasses | None]:
    """Have the trainer begin with groups that have ended, if that is wanted."""
    if not settings.train.begins_early:
        return nullcontext()
    return early_passes(parts.trainer, settings.train.loss, settings.advantages, settings.image_token_id)


async def _run_step_groups(
    settings: LoopSettings, parts: Parts, step: int, adapter: AdapterRef, begun: EarlyPasses | None
) -> list[RolloutGroup]:
    """One group per place in the batch; `tasks` beyond those stand by to replace groups that teach nothing."""
    tasks = parts.tasks.batch(step - 1, settings.groups_per_batch * settings.max_refill_factor)
    source = Source(phase="step", step=step)
    first_tasks = tuple(tasks[: settings.groups_per_batch])
    await parts.recorder.record(
        SourceStarted(
            source=source, tasks=first_tasks, group_size=settings.group_size, policy_version=adapter.policy_version
        )
    )
    plan = GroupPlan(
        source=source,
        group_size=settings.group_size,
        params=settings.params.seeded(step - 1),
        min_group_size=settings.min_group_size,
    )

    async def run(task: Task, index: int) -> RolloutGroup:
        return parts.memory.replay.join(await run_group(parts.runner, task, index, plan))

    async def on_end(group: RolloutGroup, replaced_by: Task | None) -> None:
        await record_group_end(settings, parts, source, group, replaced_by)
        if begun is not None:
            begun.add(group)

    return await collect_groups(tasks, settings.groups_per_batch, run, on_end)


async def record_group_end(
    settings: LoopSettings, parts: Parts, source: Source, group: RolloutGroup, replaced_by: Task | None = None
) -> None:
    """Record a group of a training step with its advantages."""
    advantages = advantages_of(group, settings.advantages)
    place = group.index % settings.groups_per_batch
    if place < settings.num_groups_to_log:
        parts.log.log_group(place, group.rewards)
        logger.info("step=%d group=%d task=%s rewards=%s", source.step, group.index, group.task_id, group.rewards)
    await parts.recorder.record(GroupEnded(source=source, group=group, advantages=advantages, replaced_by=replaced_by))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What a step trained on and what was measured."""

    step: int
    groups: list[RolloutGroup]
    batch: Batch
    training_logprobs: tuple[tuple[float, ...], ...]
    metrics: dict[str, float]

    @property
    def has_moved(self) -> bool:
        """Whether the weights changed: a step without KL whose groups are all constant leaves them as they were."""
        return bool(self.batch.datums)


async def train_groups(
    settings: LoopSettings,
    parts: Parts,
    step: int,
    groups: list[RolloutGroup],
    policy_version: int,
    clock: Clock,
    parity_version: int | None = None,
    begun: EarlyPasses | None = None,
) -> TrainedStep:
    """Advantages, datums, forward_backward, optim_step; `policy_version` is what the trainer holds before the step.

    With `parity_version`, the parity gate looks only at turns of that version.
    """
    with clock.time("datums"):
        keeps = settings.train.has_kl_term
        build = partial(build_batch, groups, settings.advantages, settings.image_token_id, keeps_constant=keeps)
        batch = await asyncio.to_thread(build)
    metrics = rollout_metrics(groups) | curriculum_metrics(groups, settings.groups_per_batch) | batch.metrics
    metrics |= replay_metrics(groups, policy_version)
    logprobs: tuple[tuple[float, ...], ...] = ()
    if batch.datums:
        rate = scheduled_learning_rate(settings.train, step, settings.max_steps)
        with clock.time("train"):
            result = await train_step(
                parts.trainer,
                batch.datums,
                settings.train,
                step=step,
                learning_rate=rate,
                num_rollouts=batch.num_rollouts,
                replayed_ids=batch.replayed_ids,
                policy_version=parity_version,
                begun=begun,
            )
        metrics, logprobs = metrics | result.metrics, result.training_logprobs
    return TrainedStep(step=step, groups=groups, batch=batch, training_logprobs=logprobs, metrics=metrics)


async def finish_step(
    settings: LoopSettings, parts: Parts, trained: TrainedStep, policy_version: int, clock: Clock
) -> None:
    """Remember, record and report a step; `policy_version` is what it made."""
    metrics = trained.metrics | await parts.memory.remember(trained.step, trained.groups)
    metrics |= parts.device_metrics()
    metrics |= clock.metrics() | _speeds(metrics, clock.seconds) | {"progress/policy_version": float(policy_version)}
    await parts.recorder.record(await asyncio.to_thread(_step_trained, trained, policy_version, metrics))
    parts.log.log_step(trained.step, metrics)


def _speeds(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """What the step got done per unit of time; a step that trained nothing has no speed of training."""
    step_s, train_s = max(1e-9, seconds["step"]), seconds.get("train")
    speeds = {
        "time/tokens_per_s": metrics["rollout/sampled_tokens"] / step_s,
        "time/rollouts_per_hour": 3600 * metrics["rollout/num_rollouts"] / step_s,
    }
    return speeds | ({"time/trained_tokens_per_s": metrics["rollout/datum_tokens"] / train_s} if train_s else {})


def _step_trained(trained: TrainedStep, policy_version: int, metrics: Mapping[str, float]) -> StepTrained:
    batch = trained.batch
    return StepTrained(
        step=trained.step,
        policy_version=policy_version,
        datums_sha256=datums_sha256(batch.datums),
        num_datums=len(batch.datums),
        training_logprobs=logprobs_by_turn(batch.datums, trained.training_logprobs, leave_out=batch.replayed_ids),
        metrics=metrics,
    )


def is_checkpoint_due(settings: LoopSettings, num_steps: int) -> bool:
    """Whether a checkpoint is saved after `num_steps` steps; the last step always gets one."""
    return num_steps == settings.max_steps or bool(settings.save_every and num_steps % settings.save_every == 0)


def is_evaluation_due(settings: LoopSettings, num_steps: int) -> bool:
    """Whether the policy is evaluated after `num_steps` steps; the last step always is."""
    return num_steps == settings.max_steps or bool(settings.eval_every and num_steps % settings.eval_every == 0)


def first_evaluations(settings: LoopSettings, adapter: AdapterRef) -> list[WantedEvaluation]:
    """What is evaluated before the first step: the untrained policy, or what a killed attempt did not finish."""
    if settings.first_step == 1:
        if not settings.has_baseline:
            return []
        return [WantedEvaluation(phase="baseline", step=0, adapter=adapter)]
    return list(settings.owed_evaluations)


async def save_checkpoint(parts: Parts, num_steps: int) -> None:
    """Everything that a resume needs, in the order in which a crash may cut it short."""
    await parts.recorder.flush()  # a resumed run finds in the database whatever this checkpoint builds on
    state_path, sampler_path = await parts.policy.save_checkpoint(num_steps)
    await parts.recorder.record(
        CheckpointSaved(step=num_steps, state_path=str(state_path), sampler_path=str(sampler_path))
    )


async def evaluate(parts: Parts, wanted: WantedEvaluation) -> None:
    """Measure an adapter on the held-out tasks, if there are any."""
    if parts.evaluator is not None:
        source = Source(phase=wanted.phase, step=wanted.step)
        result = await parts.evaluator.run(source, wanted.adapter)
        parts.log.log_evaluation(wanted.phase, wanted.step, result)
