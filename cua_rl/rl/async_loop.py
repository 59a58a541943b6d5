"""The off-policy loop: rollouts, training, publication and evaluation run side by side.

                     room and admission                    a batch                  saved weights         an adapter
    ┌─────────┐ starts ┌────────┐ finish ┌─────────────┐ takes ┌─────────┐ hands over ┌───────────┐ asks ┌───────────┐
    │ starter │───────►│ groups │───────►│ GroupBuffer │──────►│ trainer │───────────►│ publisher │─────►│ evaluator │
    └────▲────┘        └────────┘        └──────▲──────┘       └─────────┘  queue, 1  └─────┬─────┘ q., 2└───────────┘
         │ frees a slot    │                    │ frees places                              │
         └─────────────────┘                    └───────────── announces policy k ──────────┘

What waits for what: the starter for a free slot (`RolloutLimit`: devices, memory, the server's KV cache) and until the
buffer's admission allows one more group; groups for devices and the model; the trainer for a batch; the publisher for
saved weights; the evaluator for an adapter. The trainer waits for the publisher only if that is a whole step behind,
the publisher for the evaluator only if two evaluations wait: nothing is skipped. There is no deadlock: slots are freed
by groups, which wait for no coroutine of the loop; batches need only groups, as `GroupBuffer` proves.

Rollouts switch policy in mid-flight: the next request goes to the adapter announced last, every turn keeps the version
that sampled it, and no turn is trained more than `max_lag` steps after that policy was the newest (`GroupBuffer` has
the proof, every step measures it). No group is discarded. Only the trainer is finite; the other coroutines end after
it, and one that fails cancels all.

The parity gate compares sampler and trainer at the same weights, so only turns of the version that the trainer holds
before the step count. A batch may train none; then its constant groups and finished ones that wait for a later batch
are probed. If the gate saw no turn for `PARITY_EVERY` steps, because training is the bottleneck, the next batch waits
until a group with such a turn has finished: one rollout's time in ten steps. In between, the canary proves every
adapter.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from cua_rl.events import BatchTaken, RolloutSource, SourceStarted
from cua_rl.metrics import merge_metrics
from cua_rl.rl.advantages import ScoredGroup
from cua_rl.rl.datums import build_datums
from cua_rl.rl.group_buffer import GroupBuffer, Place, PolicyAges, WaitingGroup, lag_metrics, require_lag
from cua_rl.rl.parity import ParityGate
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import (
    Clock,
    LoopParts,
    LoopSettings,
    TrainedStep,
    WantedEvaluation,
    build_step_batch,
    evaluate,
    first_evaluations,
    is_evaluation_due,
    record_step,
    save_checkpoint,
    score_and_record,
)
from cua_rl.rl.train_step import TrainStepResult, train_step
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.rollout.limit import LimitedRunner, RolloutLimit
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import AdapterRef, Datum, Rollout

logger = logging.getLogger(__name__)

PARITY_EVERY = 10
NUM_PROBES = 4  # sequences that the parity gate compares if the batch has no turn of the newest policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncStart:
    """State restored from an earlier attempt of the run; empty by default."""

    done_ordinals: frozenset[int] = frozenset()
    """Ordinals of groups that the steps before `first_step` have trained or replaced."""
    kept_groups: tuple[WaitingGroup, ...] = ()
    """Finished groups that no step before `first_step` has trained, of policies that the checkpoint knows."""
    newest_steps: Mapping[int, int] = field(default_factory=dict[int, int])
    """Per policy version the largest number of steps after which it was the newest."""


async def train(
    settings: LoopSettings, parts: LoopParts, *, max_lag: int, limit: RolloutLimit, start: AsyncStart | None = None
) -> None:
    """Train from `first_step` to `max_steps` with rollouts at most `max_lag` steps old."""
    adapter = await parts.policy.publish(settings.first_step - 1)
    buffer = GroupBuffer(
        groups_per_batch=settings.config.groups_per_batch,
        max_lag=max_lag,
        max_steps=settings.config.max_steps,
        next_step=settings.first_step,
        announced_step=settings.first_step - 1,
        max_drops_per_batch=(settings.config.max_refill_factor - 1) * settings.config.groups_per_batch,
    )
    run = _AsyncRun(settings, parts, limit, buffer, adapter)
    run.restore(start or AsyncStart())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run.start_groups(tasks), name="starter")
        tasks.create_task(run.train_steps(), name="trainer")
        tasks.create_task(run.publish(), name="publisher")
        tasks.create_task(run.evaluate(), name="evaluator")


class _AsyncRun:
    """Shared state; `_changed` is notified when a group may start or has finished, and when the run is complete."""

    def __init__(
        self, settings: LoopSettings, parts: LoopParts, limit: RolloutLimit, buffer: GroupBuffer, adapter: AdapterRef
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._limit = limit
        self._buffer = buffer
        self._adapter = adapter
        """The adapter announced last."""
        self._trainer_version = adapter.policy_version
        self._ages = PolicyAges()
        self._changed = asyncio.Condition()
        self._saved: asyncio.Queue[tuple[int, SavedPolicy | None]] = asyncio.Queue(maxsize=1)
        """The steps completed, and the weights to publish after them: None if the last step trained nothing."""
        self._evaluations: asyncio.Queue[tuple[WantedEvaluation, ExitStack] | None] = asyncio.Queue(maxsize=2)
        self._begun_steps: set[int] = set()
        self._task_batches: dict[int, list[Task]] = {}
        self._publish_s: float | None = None
        self._parity_due = settings.first_step
        """From this step on, a batch waits for a turn that the parity gate can compare."""

    def restore(self, start: AsyncStart) -> None:
        """Continue where an earlier attempt ended."""
        first_step = self._settings.first_step
        for version, num_steps in start.newest_steps.items():
            self._ages.announce(version, num_steps)
        self._ages.announce(self._adapter.policy_version, first_step - 1)
        self._buffer.restore(start.done_ordinals, start.kept_groups)
        if first_step > 1:
            logger.info("resume first_step=%d kept_groups=%d", first_step, len(start.kept_groups))

    async def start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups whenever there is a slot and admission allows it."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._buffer.may_start or self._buffer.is_complete)
            if self._buffer.is_complete:
                return
            await self._limit.acquire()
            place = self._buffer.start()
            await self._begin_step(place.last_step)
            tasks.create_task(self._run_group(place), name=f"group-{place.ordinal}")

    async def _begin_step(self, step: int) -> None:
        """Record a step before the first of its groups."""
        if step in self._begun_steps:
            return
        self._begun_steps.add(step)
        await self._parts.recorder.record(
            SourceStarted(
                source=RolloutSource(phase="step", step=step),
                tasks=(),
                num_groups=self._settings.config.groups_per_batch,
                group_size=self._settings.config.group_size,
                policy_version=self._adapter.policy_version,
            )
        )

    async def _run_group(self, place: Place) -> None:
        """Run a group, for which one slot is already granted, and put it into the buffer."""
        settings = self._settings
        source = RolloutSource(phase="step", step=place.last_step)
        job = GroupJob(
            source=source,
            group_size=settings.config.group_size,
            params=settings.params,
            min_group_size=settings.config.sampling.min_group_size,
            branching=settings.config.branching,
            moving_top=settings.config.credit.moving_top or 0.0,
        )
        runner = LimitedRunner(self._parts.runner, self._limit, num_granted=1)
        # the task instance of an ordinal is the same as in a synchronous run, which trains batch by batch
        number, index = divmod(place.ordinal, settings.config.groups_per_batch)
        if number not in self._task_batches:
            while len(self._task_batches) > 2 * (self._buffer.max_lag + 1):
                self._task_batches.pop(min(self._task_batches))
            self._task_batches[number] = self._parts.tasks.batch(number, settings.config.groups_per_batch)
        group = await run_group(runner, self._task_batches[number][index], place.ordinal, job)
        group = self._parts.memory.replay.join(group)
        scored = await score_and_record(settings, self._parts, source, group, first_index=place.ordinal - index)
        async with self._changed:
            if self._buffer.finish(place, scored):
                logger.info("group=%d task=%s has no learning signal, another one starts", group.index, group.task_id)
            self._changed.notify_all()

    async def train_steps(self) -> None:
        """Train batch after batch, save the new weights, hand them to the publisher."""
        for step in range(self._settings.first_step, self._settings.config.max_steps + 1):
            clock = Clock()
            old_version, saved = self._trainer_version, None
            with clock.time("step"):
                with clock.time("wait"):
                    taken = await self._take_batch(step)
                dropped = self._buffer.take_dropped()
                groups = sorted([*taken, *dropped], key=lambda scored: scored.group.index)
                trains_all = self._settings.config.has_kl_term
                trained = groups if trains_all else [*taken, *(one for one in dropped if one.has_signal)]
                checked = await self._check_batch(step, trained, groups)
                with clock.time("datums"):
                    batch = await build_step_batch(self._settings, groups)
                result = TrainStepResult()
                if batch.datums:
                    with clock.time("train"):
                        result = await train_step(
                            self._parts.trainer,
                            batch,
                            self._settings.config,
                            step=step,
                            max_steps=self._settings.config.max_steps,
                            policy_version=old_version,
                        )
                    with clock.time("save"):
                        saved = await self._parts.policy.save(step)
                    self._trainer_version = saved.adapter.policy_version
            self._ages.announce(self._trainer_version, step)
            if "policy/parity_mean_abs" in {**result.metrics, **checked}:
                self._parity_due = step + PARITY_EVERY
            in_flight = {
                "async/num_running_groups": float(self._buffer.num_running),
                "async/num_waiting_groups": float(self._buffer.num_waiting),
                "async/num_running_rollouts": float(self._limit.num_running),
                "async/max_running_rollouts": float(self._limit.allowed),
            }
            published = {} if self._publish_s is None else {"time/publish_s": self._publish_s}
            trained = TrainedStep(
                step=step,
                groups=groups,
                batch=batch,
                result=result,
                old_version=old_version,
                adapter=None if saved is None else saved.adapter,
                metrics=merge_metrics(checked, in_flight, published),
            )
            await record_step(self._settings, self._parts, trained, clock)
            del taken, dropped, groups, batch, result, trained  # screenshots take gigabytes
            await save_checkpoint(self._settings, self._parts, step)  # before anything is sampled that builds on it
            await self._saved.put((step, saved))

    async def _take_batch(self, step: int) -> list[ScoredGroup]:
        """The groups of the next step. If parity is due, one of them can be compared, unless none ever will be."""

        def can_compare() -> bool:
            buffer = self._buffer
            is_announced = buffer.announced_step == buffer.next_step - 1
            is_over = is_announced and not buffer.num_running and not buffer.may_start
            return is_over or any(self._fresh_rollouts(buffer.waiting))

        async with self._changed:
            if step >= self._parity_due:
                await self._changed.wait_for(can_compare)
            while (batch := self._buffer.take_batch()) is None:
                await self._changed.wait()
            self._changed.notify_all()
        return batch

    async def _check_batch(self, step: int, trained: list[ScoredGroup], groups: list[ScoredGroup]) -> dict[str, float]:
        """Record which groups a step takes, check the lag of those that it trains, and probe parity, on others if none
        of these is fresh.
        """
        await self._begin_step(step)
        await self._parts.recorder.record(
            BatchTaken(step=step, group_ids=tuple(scored.group.group_id for scored in groups))
        )
        train = self._settings.config
        lags = self._ages.lags([scored.group for scored in trained], step)
        require_lag(lags, self._buffer.max_lag, step=step)
        metrics = lag_metrics(lags)
        compared = (scored for scored in trained if train.has_kl_term or scored.has_signal)
        others = [*groups, *self._buffer.waiting]
        probes = [] if self._fresh_datums(compared) else self._fresh_datums(others)[:NUM_PROBES]
        if probes:
            rows = await self._parts.trainer.forward(probes, temperature=train.temperature)
            gate = ParityGate(limit=train.parity_limit, step=step, policy_version=self._trainer_version)
            return merge_metrics(metrics, gate.check(probes, rows))
        return metrics

    def _fresh_datums(self, groups: Iterable[ScoredGroup]) -> list[Datum]:
        """Sequences with turns of the trainer's version; a few are enough."""
        datums: list[Datum] = []
        for rollout in islice(self._fresh_rollouts(groups), NUM_PROBES):
            built = build_datums(rollout, 0.0, self._settings.image_token_id).datums
            datums += [datum for datum in built if self._trainer_version in datum.policy_versions]
        return datums

    def _fresh_rollouts(self, groups: Iterable[ScoredGroup]) -> Iterator[Rollout]:
        """Rollouts with a turn of the trainer's version."""
        for rollout in (rollout for scored in groups for rollout in scored.group.rollouts):
            if any(turn.model.policy_version == self._trainer_version for turn in rollout.turns):
                yield rollout

    async def publish(self) -> None:
        """Serve saved weights, announce them, and hand them to the evaluator where an evaluation is due."""
        for wanted in first_evaluations(self._settings, self._adapter):
            await self._want_evaluation(wanted)
        for _ in range(self._settings.first_step, self._settings.config.max_steps + 1):
            num_steps, saved = await self._saved.get()
            if saved is not None:
                clock = Clock()
                with clock.time("publish"):
                    self._adapter = await self._parts.policy.serve(saved)
                self._publish_s = clock.seconds["publish"]
            async with self._changed:
                self._buffer.announce(num_steps)
                self._changed.notify_all()
            if is_evaluation_due(self._settings, num_steps):
                await self._want_evaluation(WantedEvaluation(phase="eval", step=num_steps, adapter=self._adapter))
        await self._evaluations.put(None)

    async def _want_evaluation(self, wanted: WantedEvaluation) -> None:
        held = ExitStack()
        held.enter_context(self._parts.policy.hold(wanted.adapter))
        await self._evaluations.put((wanted, held))

    async def evaluate(self) -> None:
        """Evaluate adapters one after the other, each pinned to its version; its folder is held until then."""
        while (item := await self._evaluations.get()) is not None:
            wanted, held = item
            with held:
                await evaluate(self._parts, wanted)
