"""Time that the policy spends ends a rollout as its turns do; sampling is nobody's time; the device's is a fault."""

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from cua_rl.agent.agent import AgentOutcome
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.environments.config import DeviceConfig
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import Event, RolloutSource
from cua_rl.reporting.comparison import EvalResult
from cua_rl.types.actions import Action, Click, Wait
from cua_rl.types.errors import DeviceError
from cua_rl.types.rollout import AdapterRef, AgentTurn, Rollout, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeAgent, FakeDevice, FakeRecorder, make_task
from tests.jumping_time import run_jumping
from tests.rollout.test_run import PARAMS, Bench, plan


@dataclass
class SlowDevice(FakeDevice):
    """Waits as long as it is asked to, and takes `overhead_s` for everything else."""

    overhead_s: float = 0.0

    async def execute(self, action: Action) -> None:
        await super().execute(action)
        await asyncio.sleep(action.duration_s if isinstance(action, Wait) else self.overhead_s)


class SlowBench(Bench):
    overhead_s = 0.0

    async def _make(self, task: object) -> Any:
        self.devices.append(SlowDevice(device_id=f"device-{len(self.devices)}", overhead_s=self.overhead_s))
        return self.devices[-1]


class Waiting:
    """Of ten rollouts three succeed at once, two give up at once, five wait for `wait_s` and then give up."""

    def __init__(self, random: Random, *, wait_s: float, respond_s: float = 1.0) -> None:
        self.random = random
        self.wait_s = wait_s
        self.respond_s = respond_s
        self.num_turns = 0

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        client, timed = access.openai_client(task.rollout_id), TimedDevice(device, clock)
        luck = self.random.random()
        for index, action in enumerate([Wait(duration_s=self.wait_s), None] if luck > 0.5 else [None]):
            self.num_turns += 1
            with clock.uncharged():
                await asyncio.sleep(self.respond_s)  # the model server
            client.append(model_turn(prompt(text(1, 2)), response_id=f"resp-{self.num_turns}"))
            if action is not None:
                await timed.execute(action)
            elif luck < 0.3:
                device.state = "1"
            await on_turn(
                AgentTurn(
                    response_id=client[-1].response_id,
                    before=await timed.observe(),
                    action=action,
                )
            )
            if clock.is_used_up:
                return AgentOutcome(stop_reason=StopReason.MAX_TIME, num_turns=index + 1)
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1)


async def evaluate(agent: Any, limits: DeviceConfig, num_tasks: int = 400) -> EvalResult:
    bench = SlowBench(agent, max_devices=num_tasks, time_limits=limits)
    tasks = [make_task(f"task-{number}", seed=number) for number in range(num_tasks)]
    evaluator = Evaluator(tasks=tasks, runner=bench.runner, params=PARAMS, recorder=bench.recorder)
    return await evaluator.run(RolloutSource(phase="eval", step=0), AdapterRef(path=None, policy_version=0))  # type: ignore[arg-type]


def test_a_policy_that_waits_too_long_where_it_would_fail_is_not_reported_as_twice_as_good() -> None:
    result = run_jumping(evaluate(Waiting(Random(5), wait_s=60.0), DeviceConfig(task_timeout_s=30.0)))

    assert (result.num_rollouts, result.num_faults) == (400, 0)
    assert result.success_rate == pytest.approx(0.3, abs=0.05)  # 0.60 where what runs out of time is left out


async def test_the_last_turn_of_a_rollout_that_waits_too_long_is_kept_and_the_wait_cut_short() -> None:
    bench = SlowBench(Waiting(Random(5), wait_s=60.0, respond_s=0.0), time_limits=DeviceConfig(task_timeout_s=0.01))
    rollouts = [await bench.runner.run(plan()) for _ in range(10)]

    waited = [rollout for rollout in rollouts if rollout.stop_reason is StopReason.MAX_TIME]
    assert waited
    assert all((len(rollout.turns), rollout.reward and rollout.reward.total) == (1, 0.0) for rollout in waited)
    assert waited[0].turns[0].agent.action == Wait(duration_s=60.0)
    assert max(action.duration_s for device in bench.devices for action in device.actions) <= 0.01  # type: ignore[union-attr]


def test_time_of_sampling_is_nobodys_and_that_of_the_device_never_the_policys() -> None:
    limits = DeviceConfig(turn_timeout_s=100.0, task_timeout_s=5.0)

    class HangingBench(SlowBench):
        overhead_s = 101.0

    class Clicking(Waiting):
        async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
            await TimedDevice(device, clock).execute(Click(x=1, y=1))
            return await super().run(task, device, access, clock=clock, on_turn=on_turn)

    async def run(kind: type[SlowBench], agent: Waiting) -> list[Rollout]:
        return [await kind(agent, time_limits=limits).runner.run(plan()) for _ in range(10)]

    rambling = run_jumping(run(SlowBench, Waiting(Random(5), wait_s=4.0, respond_s=3600.0)))
    hanging = run_jumping(run(HangingBench, Clicking(Random(5), wait_s=4.0)))

    assert {rollout.stop_reason for rollout in rambling} == {StopReason.FINISHED}
    assert max(rollout.duration_s for rollout in rambling) < 5  # of real time: the test waits for nothing
    assert {rollout.stop_reason for rollout in hanging} == {StopReason.TIME_LIMIT}
    assert hanging[0].error == "expected the device to take at most 100 s for a turn, it took longer"


def test_an_outage_of_the_database_is_nobodys_time() -> None:
    class Away(FakeRecorder):
        async def record(self, event: Event) -> None:
            await asyncio.sleep(600.0)

    async def run() -> Rollout:
        bench = Bench(FakeAgent(["1"]), time_limits=DeviceConfig(turn_timeout_s=100.0, task_timeout_s=5.0))
        return await replace(bench.runner, recorder=Away()).run(plan())

    ended = run_jumping(run())

    assert (ended.stop_reason, ended.success) == (StopReason.FINISHED, True)


def test_a_wait_longer_than_the_limit_of_a_turn_is_no_fault_and_a_device_that_hangs_in_it_is() -> None:
    @dataclass
    class Hanging(SlowDevice):
        async def execute(self, action: Action) -> None:
            await super().execute(action)
            await asyncio.sleep(20.0)

    class HangingBench(SlowBench):
        async def _make(self, task: object) -> Any:
            return Hanging()

    async def run(bench: type[SlowBench]) -> set[StopReason]:
        limits = DeviceConfig(turn_timeout_s=10.0, task_timeout_s=100.0)
        agent = Waiting(Random(5), wait_s=50.0)
        return {(await bench(agent, time_limits=limits).runner.run(plan())).stop_reason for _ in range(10)}

    assert run_jumping(run(SlowBench)) == {StopReason.FINISHED}
    assert run_jumping(run(HangingBench)) == {StopReason.FINISHED, StopReason.TIME_LIMIT}


def test_between_the_calls_of_an_agent_outside_it_is_the_agents_time() -> None:
    async def run() -> tuple[float, float, bool]:
        clock = RolloutClock(task_timeout_s=10.0, turn_timeout_s=10.0)
        clock.charge_between_calls()
        async with clock.limit():
            await asyncio.sleep(2.0)  # the agent thinks
            with clock.call():
                await asyncio.sleep(9.0)  # the model answers
            clock.next_turn()
            with clock.call(), clock.call():
                await asyncio.sleep(9.0)  # device and model at a time
            after_calls = clock.policy_left_s
            clock.credit(1.0)
            after_credit = clock.policy_left_s
            await clock.used_up()
        return after_calls, after_credit, clock.is_used_up

    assert run_jumping(run()) == (pytest.approx(8.0, abs=0.1), pytest.approx(9.0, abs=0.1), True)


def test_credit_for_an_earlier_turn_gives_a_call_that_hangs_no_more_time() -> None:
    async def hang(clock: RolloutClock) -> None:
        async with clock.limit():
            with clock.call():
                await asyncio.sleep(9.0)
                clock.credit(1.0)
                await asyncio.sleep(100.0)

    async def run() -> float:
        began = asyncio.get_running_loop().time()
        clock = RolloutClock(task_timeout_s=100.0, turn_timeout_s=10.0)
        clock.charge_between_calls()
        with pytest.raises(TimeoutError):
            await hang(clock)
        return asyncio.get_running_loop().time() - began

    assert run_jumping(run()) == pytest.approx(10.0, abs=0.1)  # 19 where what had passed was forgotten


async def test_a_timed_device_is_the_device_but_for_its_time() -> None:
    device = FakeDevice(state="7")
    timed = TimedDevice(device, RolloutClock(task_timeout_s=1.0, turn_timeout_s=1.0))

    assert (timed.device_id, timed.kind, await timed.query("state")) == (device.device_id, device.kind, "7")
    await timed.close()
    assert device.is_closed


class Risky:
    """Succeeds in three of ten rollouts; half of those that would fail take the device with them."""

    def __init__(self, random: Random) -> None:
        self.random = random

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        luck = self.random.random()
        if luck > 0.65:
            raise DeviceError("the app took the device down")
        device.state = "1" if luck < 0.3 else "0"
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1)


async def test_bounds_hold_the_truth_where_faults_depend_on_the_outcome() -> None:
    result = await evaluate(Risky(Random(3)), DeviceConfig())

    assert result.success_rate == pytest.approx(0.3 / 0.65, abs=0.05)  # what the faults leave over is too good
    assert not result.low < 0.3 < result.high
    assert result.worst == pytest.approx(0.3, abs=0.05)
    assert result.worst - 0.03 < 0.3 < result.best
    metrics = result.metrics("held_out")
    assert (metrics["eval/held_out/success_rate_worst"], metrics["eval/held_out/success_rate_best"]) == (
        result.worst,
        result.best,
    )
