"""A world in which time is counted in turns of the event loop: rollouts of any length, a policy, a trainer."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from cua_rl.events import BatchTaken, GroupEnded, StepTrained
from cua_rl.rl.async_loop import AsyncStart, train
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.rollout import AdapterRef, Rollout, RolloutGroup
from tests import builders
from tests.fakes import FakePolicy, FakeRecorder, FakeTrainer
from tests.rl.test_sync_loop import Log, Seeds, settings


class World:
    """Everything around the loop, faked; rollouts take a heavy-tailed number of loop turns per turn."""

    def __init__(self, seed: int = 0, longest: int = 200, max_rollouts: int = 1000) -> None:
        self.random = Random(seed)
        self.longest = longest
        self.recorder, self.log, self.trainer = FakeRecorder(), Log(), FakeTrainer()
        self.policy = ServedVersions(self.trainer)
        self.limit = RolloutLimit(largest=max_rollouts)
        self.num_rollouts = 0
        self.most_rollouts = 0
        self._running = 0

    async def run(self, plan: RolloutJob) -> Rollout:
        """Run one rollout of up to three turns, each with the policy that is served then."""
        number, self.num_rollouts = self.num_rollouts, self.num_rollouts + 1
        self._running += 1
        self.most_rollouts = max(self.most_rollouts, self._running)
        models = []
        for turn in range(1 + number % 3):
            version = self.policy.served_version
            await self.pause()
            prompt = builders.prompt(builders.text(*range(1, 2 + 3 * turn)))
            models.append(builders.model_turn(prompt, policy_version=version, response_id=f"{number}-{turn}"))
        self._running -= 1
        rollout = builders.rollout(
            *models, reward=self.reward(plan), rollout_id=f"rollout-{number}", member_index=plan.member_index
        )
        return rollout

    def reward(self, plan: RolloutJob) -> float:
        return float(plan.member_index % 2)

    async def pause(self) -> None:
        for _ in range(min(self.longest, int(self.random.paretovariate(0.7)))):
            await asyncio.sleep(0)

    def parts(self, **changes: Any) -> LoopParts:
        values: dict[str, Any] = {
            "tasks": Seeds(),
            "runner": self,
            "trainer": self.trainer,
            "policy": self.policy,
            "evaluator": None,
            "recorder": self.recorder,
            "log": self.log,
        }
        return LoopParts(**values | changes)

    async def train(self, max_lag: int, start: AsyncStart | None = None, **changes: Any) -> None:
        await train(settings(**changes), self.parts(), max_lag=max_lag, limit=self.limit, start=start)

    @property
    def batches(self) -> list[list[RolloutGroup]]:
        """What each step trained, from the record."""
        groups = {event.group.group_id: event.group for event in self.recorder.events if isinstance(event, GroupEnded)}
        taken = [event for event in self.recorder.events if isinstance(event, BatchTaken)]
        return [[groups[group_id] for group_id in event.group_ids] for event in taken]

    @property
    def num_ended_groups(self) -> int:
        return sum(isinstance(event, GroupEnded) for event in self.recorder.events)

    @property
    def trained_steps(self) -> list[int]:
        return [event.step for event in self.recorder.events if isinstance(event, StepTrained)]


class ServedVersions(FakePolicy):
    """A policy whose publication takes a while; versions are the trainer's."""

    def __init__(self, trainer: FakeTrainer, publish_turns: int = 5) -> None:
        super().__init__()
        self.trainer = trainer
        self.served_version = 0
        self.publish_turns = publish_turns

    async def save(self, step: int) -> SavedPolicy:
        saved = await super().save(step)
        adapter = AdapterRef(path=saved.adapter.path, policy_version=self.trainer.policy_version)
        return SavedPolicy(step=step, adapter=adapter, canary=None)

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        for _ in range(self.publish_turns):
            await asyncio.sleep(0)
        self.served_version = saved.adapter.policy_version
        return await super().serve(saved)


def largest_lag(batches: Sequence[Sequence[RolloutGroup]]) -> int:
    """The largest number of steps between sampling and training over all turns, where versions are steps."""
    return max(
        step - 1 - turn.model.policy_version
        for step, groups in enumerate(batches, start=1)
        for group in groups
        for rollout in group.rollouts
        for turn in rollout.turns
    )


def times_trained(batches: Sequence[Sequence[RolloutGroup]]) -> Counter[int]:
    """How often each task instance of the run was trained, by its ordinal."""
    return Counter(group.index for groups in batches for group in groups)
