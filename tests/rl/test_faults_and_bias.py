"""Device faults cost time, never correctness: batch sizes hold, rewards stay unbiased, nothing leaks."""

from contextlib import asynccontextmanager
from math import sqrt
from random import Random
from statistics import fmean, pvariance
from typing import Any

from cua_rl.agent.agent import AgentOutcome
from cua_rl.agent.policy_time import TimedDevice
from cua_rl.events import GroupEnded, RolloutStarted
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.async_loop import train
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutRunner
from cua_rl.types.actions import Wait
from cua_rl.types.errors import DeviceError
from cua_rl.types.rollout import AgentTurn, RolloutGroup, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeDevice, FakeGateway, FakePolicy, FakeRecorder, FakeTrainer
from tests.rl.async_world import World
from tests.rl.test_sync_loop import settings

NUM_STEPS, GROUPS_PER_BATCH, GROUP_SIZE = 64, 8, 4  # 512 groups, 2,048 rollouts


class LuckyAgent:
    """Succeeds in half of its rollouts, whatever the device does to it; the device is lost in some."""

    def __init__(self, random: Random, fault_rate: float) -> None:
        self.random = random
        self.fault_rate = fault_rate
        self.num_turns = 0

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        self.num_turns += 1
        response_id = f"resp-{self.num_turns}"
        access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=response_id))
        seen = await device.observe()
        await on_turn(
            AgentTurn(
                response_id=response_id,
                before=seen,
            )
        )
        is_lucky, is_lost = self.random.random() < 0.5, self.random.random() < self.fault_rate
        if is_lost:
            raise DeviceError("the device is gone")
        device.state = "1" if is_lucky else "0"
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1, answer=None)


class CountedDevices:
    """Lends devices and counts those that are out."""

    def __init__(self) -> None:
        self.num_leased = 0
        self.most_leased = 0

    @asynccontextmanager
    async def lease(self, request: Any) -> Any:
        self.num_leased += 1
        self.most_leased = max(self.most_leased, self.num_leased)
        try:
            yield FakeDevice()
        finally:
            self.num_leased -= 1


async def run_with_faults(fault_rate: float) -> tuple[list[RolloutGroup], CountedDevices, FakeGateway, list[Any]]:
    return await run_with(LuckyAgent(Random(1), fault_rate))


async def run_with(agent: Any) -> tuple[list[RolloutGroup], CountedDevices, FakeGateway, list[Any]]:
    devices, gateway, recorder = CountedDevices(), FakeGateway(), FakeRecorder()
    runner = RolloutRunner(
        devices=devices,  # type: ignore[arg-type]
        gateway=gateway,  # type: ignore[arg-type]
        agent=agent,
        reward=binary_reward,
        recorder=recorder,
        max_turns=5,
    )
    trainer, limit = FakeTrainer(), RolloutLimit(largest=32)
    parts = World().parts(runner=runner, recorder=recorder, trainer=trainer, policy=FakePolicy())
    chosen = settings(max_steps=NUM_STEPS, groups_per_batch=GROUPS_PER_BATCH, group_size=GROUP_SIZE, save_every=0)
    # the fake gateway gives every turn version 0, so the bound is out of the way
    await train(chosen, parts, max_lag=NUM_STEPS, limit=limit)
    assert limit.num_running == 0
    groups = [event.group for event in recorder.events if isinstance(event, GroupEnded)]
    return groups, devices, gateway, recorder.events


async def test_with_a_fifth_of_devices_lost_batches_hold_and_rewards_are_unbiased() -> None:
    clean, *_ = await run_with_faults(0.0)
    faulty, devices, gateway, events = await run_with_faults(0.2)

    num_faults = sum(len(group.faulty) for group in faulty)
    num_started = sum(isinstance(event, RolloutStarted) for event in events)
    assert num_faults / num_started > 0.15
    assert len(clean) == len(faulty) == NUM_STEPS * GROUPS_PER_BATCH
    assert fmean(len(group.rollouts) for group in faulty) > 0.98 * GROUP_SIZE  # three attempts: 0.2**3 = 0.8 % missing
    rewards, undisturbed = ([r for group in groups for r in group.rewards] for groups in (faulty, clean))
    error = sqrt(pvariance(rewards) / len(rewards) + pvariance(undisturbed) / len(undisturbed))
    assert abs(fmean(rewards) - fmean(undisturbed)) < 3 * error  # 3 * sqrt(0.25 / 2048 * 2) = 0.047
    assert devices.num_leased == 0
    assert gateway.open == set()
    assert devices.most_leased <= 32


class WaitingAgent:
    """Three in ten rollouts succeed, two fail at once, five ask for a wait that is longer than their time."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.num_turns = 0

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        self.num_turns += 1
        response_id, luck = f"resp-{self.num_turns}", self.random.random()
        access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=response_id))
        if luck > 0.5:
            await TimedDevice(device, clock).execute(Wait(duration_s=3600.0))
        device.state = "1" if luck < 0.3 else "0"
        await on_turn(
            AgentTurn(
                response_id=response_id,
                before=await device.observe(),
            )
        )
        if clock.is_used_up:
            return AgentOutcome(stop_reason=StopReason.MAX_TIME, num_turns=1)
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1)


async def test_rollouts_that_end_because_of_the_policy_stay_in_the_batch_whatever_their_outcome() -> None:
    groups, *_ = await run_with(WaitingAgent(Random(1)))

    rewards = [reward for group in groups for reward in group.rewards]
    stops = [rollout.stop_reason for group in groups for rollout in group.rollouts]
    assert len(rewards) == NUM_STEPS * GROUPS_PER_BATCH * GROUP_SIZE
    assert abs(fmean(rewards) - 0.3) < 3 * sqrt(0.3 * 0.7 / len(rewards))  # 0.60 if what ran out of time were left out
    assert abs(stops.count(StopReason.MAX_TIME) / len(stops) - 0.5) < 0.04
