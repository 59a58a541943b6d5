"""A run is cancelled, as by SIGTERM, or dies, at every call that its loop makes: in start-up, baseline, sampling,
training, publication, evaluation and saving. It loses one step at most, and the next attempt completes the run.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from cua_rl.database.progress import Progress
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import BatchTaken, Event, GroupEnded, StepTrained
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.resume import plan_start
from cua_rl.run.training_config import CLIConfig
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.types.rollout import AdapterRef, Datum, Rollout, SamplingParams
from tests.builders import model_turn, prompt, rollout, text
from tests.fakes import FakeRecorder, make_task
from tests.rl.async_world import ServedVersions
from tests.rl.test_resume import Learner, SeededRunner
from tests.rl.test_sync_loop import Log, Seeds, settings

NUM_STEPS = 4
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
End = Literal["SIGTERM", "SIGKILL"]
"""Whether what was recorded is written before the process ends."""


class Stop:
    """Counts calls, and cancels the loop in the middle of one of them."""

    def __init__(self, at: int) -> None:
        self.calls: list[str] = []
        self.loop: asyncio.Task[None] | None = None
        self._at = at

    async def reach(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) == self._at and self.loop is not None:
            self.loop.cancel()
        await asyncio.sleep(0)


class StoppedTrainer(Learner):
    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop

    async def forward_backward(self, datums: Sequence[Datum], loss: LossConfig, **weights: Any) -> Any:
        await self._stop.reach("forward_backward")
        return await super().forward_backward(datums, loss, **weights)

    async def optim_step(self, optim: OptimConfig) -> Any:
        await self._stop.reach("optim_step")
        output = await super().optim_step(optim)
        await self._stop.reach("optim_step taken")
        return output


class StoppedRecorder(FakeRecorder):
    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self.num_durable = 0
        self._stop = stop

    async def record(self, event: Event) -> None:
        await super().record(event)
        await self._stop.reach(f"record {type(event).__name__}")

    async def flush(self) -> None:
        await self._stop.reach("flush")
        self.num_durable = len(self.events)


@dataclass
class StoppedPolicy(ServedVersions):
    """Its checkpoints are what the trainer is then; they are worth nothing before the record that they build on."""

    stop: Stop
    learner: Learner
    recorder: StoppedRecorder
    checkpoints: dict[int, tuple[str, int]]

    def __post_init__(self) -> None:
        super().__init__(self.learner, publish_turns=1)

    async def save(self, step: int) -> SavedPolicy:
        await self.stop.reach("save adapter")
        return await super().save(step)

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        await self.stop.reach("serve")
        return await super().serve(saved)

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]:
        durable = self.recorder.events[: self.recorder.num_durable]
        assert step in [event.step for event in durable if isinstance(event, StepTrained)]
        await self.stop.reach("save checkpoint")
        self.checkpoints[step] = (self.learner.weight, self.learner.policy_version)
        await self.stop.reach("checkpoint saved")
        return await super().save_checkpoint(step, is_interim=is_interim)


class StoppedRunner(SeededRunner):
    """Asynchronous rollouts take two turns, each with the policy that is served then."""

    def __init__(self, stop: Stop, policy: StoppedPolicy, max_lag: int) -> None:
        super().__init__(policy.learner)
        self.sampled: set[str] = set()
        self._stop, self._policy, self._max_lag = stop, policy, max_lag

    async def run(self, plan: RolloutJob) -> Rollout:
        await self._stop.reach("rollout")
        if plan.source.phase == "step":
            self.sampled.add(plan.group_id)
        if not self._max_lag:
            return await super().run(plan)
        versions = [self._policy.served_version]
        await asyncio.sleep(0)
        versions.append(self._policy.served_version)
        turns = [
            model_turn(prompt(text(*range(1, 2 + 3 * index))), policy_version=version, response_id=f"{index}")
            for index, version in enumerate(versions)
        ]
        reward = float(plan.member_index % 2)
        return rollout(*turns, reward=reward, rollout_id=plan.rollout_id, member_index=plan.member_index)


@dataclass
class Run:
    """What the attempts at a run leave on disk and on record."""

    max_lag: int
    record: list[Event] = field(default_factory=list[Event])
    checkpoints: dict[int, tuple[str, int]] = field(default_factory=lambda: {0: ("untrained", 0)})
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    weight: str = ""
    num_kept: int = 0
    sampled: set[str] = field(default_factory=set[str])
    """The groups of steps that the last attempt has sampled."""

    @property
    def num_done(self) -> int:
        """Steps after which the run can be resumed."""
        return max(self.checkpoints)

    @property
    def last_step(self) -> int:
        """The last step that is on record as trained."""
        return max((event.step for event in self.record if isinstance(event, StepTrained)), default=0)

    async def attempt(self, stop_at: int = 0, end: End = "SIGTERM") -> list[str]:
        """Go on from the newest checkpoint; returns the loop's calls."""
        stop, log, num_done = Stop(stop_at), Log(), self.num_done
        learner, recorder = StoppedTrainer(stop), StoppedRecorder(stop)
        learner.weight, learner.policy_version = self.checkpoints[num_done]
        policy = StoppedPolicy(stop, learner, recorder, self.checkpoints)
        start = self._resume(num_done)
        recorder.events, recorder.num_durable = self.record, len(self.record)
        runner = StoppedRunner(stop, policy, self.max_lag)
        parts = LoopParts(
            tasks=Seeds(),
            runner=runner,
            trainer=learner,
            policy=policy,
            evaluator=Evaluator(tasks=[make_task(seed=9)], runner=runner, params=PARAMS, recorder=recorder),
            recorder=recorder,
            log=log,
        )
        kept = {waiting.scored.group.index: waiting.scored.group for waiting in start.kept_groups}
        chosen = settings(
            first_step=num_done + 1, kept_groups=kept, params=PARAMS, max_steps=NUM_STEPS, save_every=0, eval_every=2
        )
        if self.max_lag:
            limit = RolloutLimit(largest=100)
            loop = async_loop.train(chosen, parts, max_lag=self.max_lag, limit=limit, start=start)
        else:
            loop = sync_loop.train(chosen, parts)
        stop.loop = asyncio.create_task(loop)
        with suppress(asyncio.CancelledError):
            await stop.loop
        if end == "SIGKILL" and stop_at:
            del self.record[recorder.num_durable :]
        for step, values in log.steps:
            self.metrics[step] = {name: value for name, value in values.items() if not name.startswith("time/")}
        self.weight, self.sampled = learner.weight, runner.sampled
        return stop.calls

    def _resume(self, num_done: int) -> AsyncStart:
        """What the next attempt keeps of the record, as `database.progress` and `database.writer` have it."""
        steps = {event.step: event.policy_version for event in self.record if isinstance(event, StepTrained)}
        newest = {0: 0} | {version: step for step, version in sorted(steps.items()) if step <= num_done}
        taken = {
            group_id: event.step
            for event in self.record
            if isinstance(event, BatchTaken)
            for group_id in event.group_ids
        }
        ended = [event for event in self.record if isinstance(event, GroupEnded) and event.source.phase == "step"]
        step_of = {event.group.group_id: taken.get(event.group.group_id, event.source.step) for event in ended}
        progress = Progress(
            done_indices=tuple(event.group.index for event in ended if step_of[event.group.group_id] <= num_done),
            untrained=tuple(
                (event.group, step_of[event.group.group_id])
                for event in ended
                if step_of[event.group.group_id] > num_done
                and all(turn.model.policy_version in newest for one in event.group.rollouts for turn in one.turns)
            ),
            newest_steps=newest,
            evaluated=frozenset(),
        )
        config = CLIConfig(
            max_steps=NUM_STEPS, group_size=2, groups_per_batch=2, max_steps_off_policy=self.max_lag or None
        )
        start = plan_start(config, progress, num_done)
        kept = {waiting.scored.group.group_id for waiting in start.kept_groups}
        self.num_kept += len(kept)
        self.record = [event for event in self.record if _stays(event, num_done, step_of, kept)]
        return start

    @property
    def times_trained(self) -> Counter[int]:
        """How often each group of an asynchronous run was trained, by its ordinal."""
        groups = {event.group.group_id: event.group.index for event in self.record if isinstance(event, GroupEnded)}
        batches = [event.group_ids for event in self.record if isinstance(event, BatchTaken)]
        return Counter(groups[group_id] for group_ids in batches for group_id in group_ids)


def _stays(event: Event, num_done: int, step_of: Mapping[str, int], kept: set[str]) -> bool:
    match event:
        case StepTrained(step=step) | BatchTaken(step=step):
            return step <= num_done
        case GroupEnded(group=group) if group.group_id in step_of:
            return step_of[group.group_id] <= num_done or group.group_id in kept
        case _:
            return False


async def whole_run(max_lag: int) -> tuple[Run, list[str]]:
    run = Run(max_lag)
    return run, await run.attempt()


STAGES = {
    *("rollout", "forward_backward", "optim_step", "optim_step taken", "save adapter", "serve", "flush"),
    *("save checkpoint", "checkpoint saved"),
    *("record SourceStarted", "record GroupEnded", "record StepTrained", "record EvaluationEnded"),
    "record CheckpointSaved",
}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_run_that_is_stopped_at_any_call_loses_one_step_at_most_and_is_completed(
    max_lag: int, end: End
) -> None:
    whole, calls = await whole_run(max_lag)
    assert set(calls) >= STAGES
    num_lost, num_kept = Counter[int](), 0

    for stop_at in range(1, len(calls) + 1):
        run = Run(max_lag)
        await run.attempt(stop_at, end)
        num_done = run.num_done
        num_lost[run.last_step - num_done] += 1
        await run.attempt()

        num_kept += run.num_kept
        assert sorted(run.metrics) == [1, 2, 3, 4], stop_at
        assert sorted(event.step for event in run.record if isinstance(event, StepTrained)) == [1, 2, 3, 4], stop_at
        assert len(run.sampled) == 8 - 2 * num_done - run.num_kept, stop_at  # what is kept is not sampled again
        if max_lag:
            assert run.times_trained == dict.fromkeys(range(8), 1), stop_at
        else:  # as if nobody had stopped it, to the last weight
            assert (run.metrics, run.weight) == (whole.metrics, whole.weight), stop_at

    assert set(num_lost) <= {0, 1}
    assert num_lost[0] > num_lost[1]  # only where a step is trained but not yet saved
    assert num_kept > 0


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_run_that_is_stopped_again_and_again_makes_progress_each_time_that_a_step_was_trained(
    max_lag: int,
) -> None:
    whole, calls = await whole_run(max_lag)
    for seed in range(20):
        random, run, num_stops = Random(seed), Run(max_lag), 0
        while run.num_done < NUM_STEPS:
            await run.attempt(random.randrange(1, len(calls) // 2))
            assert run.last_step - run.num_done <= 1
            num_stops += 1
        await run.attempt()

        assert num_stops > 1
        assert sorted(run.metrics) == [1, 2, 3, 4]
        if max_lag:
            assert run.times_trained == dict.fromkeys(range(8), 1)
        else:
            assert (run.metrics, run.weight) == (whole.metrics, whole.weight)
