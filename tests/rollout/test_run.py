import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cua_rl.agent.agent import AgentOutcome
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource, RolloutStarted, TurnTaken
from cua_rl.host.masking import make_key
from cua_rl.host.processes import OwnedProcess
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.advantages import score_group
from cua_rl.rollout.group import MAX_ATTEMPTS, GroupJob, collect_groups, run_group
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.types.errors import DeviceError, SamplingError
from cua_rl.types.rollout import AgentTurn, Rollout, RolloutGroup, SamplingParams, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, FakeRecorder, make_task
from tests.jumping_time import run_jumping

PARAMS = SamplingParams(max_tokens=8, temperature=1.0)
SOURCE = RolloutSource(phase="step", step=1)


class Bench:
    """A runner with everything around it faked, and the fakes at hand."""

    def __init__(self, agent: Any, max_devices: int = 4, time_limits: DeviceConfig | None = None) -> None:
        self.devices: list[FakeDevice] = []
        self.gateway, self.recorder = FakeGateway(), FakeRecorder()
        self.pool = DevicePool(self._make, max_devices=max_devices)
        self.runner = RolloutRunner(
            devices=self.pool,
            gateway=self.gateway,  # type: ignore[arg-type]
            agent=agent,
            reward=binary_reward,
            recorder=self.recorder,
            max_turns=5,
            time_limits=time_limits or DeviceConfig(),
        )

    async def _make(self, task: object) -> Any:
        self.devices.append(FakeDevice(device_id=f"device-{len(self.devices)}"))
        return self.devices[-1]


def plan() -> RolloutJob:
    return RolloutJob(source=SOURCE, group_id="g", group_index=0, member_index=0, task=make_task(), params=PARAMS)


async def test_what_a_program_printed_reaches_the_record_without_escapes_and_spent_keys(tmp_path: Path) -> None:
    key = make_key()
    program = f"print('\\x1b]0;owned\\x07\\x1b[2Jlogin failed for {key}\\x9b31m\\u202e')"
    process = OwnedProcess([sys.executable, "-X", "utf8", "-c", program], name="site", log_path=tmp_path / "site.log")
    async with process:
        assert await process.wait() == 0

    rollout = await Bench(FakeAgent([DeviceError(f"the site ended: {process.log_tail(5)}")])).runner.run(plan())

    assert rollout.error == "the site ended: login failed for ***\n"


async def test_success_is_read_from_the_device_and_not_from_the_agent() -> None:
    bench = Bench(FakeAgent(["1", "0"]))

    solved, failed = await bench.runner.run(plan()), await bench.runner.run(plan())

    assert (solved.success, solved.reward and solved.reward.total) == (True, 1.0)
    assert (failed.success, failed.reward and failed.reward.total) == (False, 0.0)
    assert failed.answer == "done"


async def test_an_attempt_knows_in_which_workers_earlier_ones_failed() -> None:
    class Failing:
        jobs: list[RolloutJob] = []  # noqa: RUF012

        async def run(self, job: RolloutJob) -> Rollout:
            self.jobs.append(job)
            rollout = await Bench(FakeAgent([DeviceError("gone")])).runner.run(job)
            return replace(rollout, worker=f"worker-{len(self.jobs)}")

    await run_group(Failing(), make_task(), 0, GroupJob(source=SOURCE, group_size=1, params=PARAMS))

    assert [sorted(map(str, job.failed_in)) for job in Failing.jobs] == [[], ["worker-1"], ["worker-1", "worker-2"]]


async def test_turns_carry_the_agents_side_and_the_gateways_side() -> None:
    bench = Bench(FakeAgent(["1"]))

    rollout = await bench.runner.run(plan())

    assert rollout.turns[0].model.response_id == "resp-1"
    assert rollout.turns[0].agent.before.data == b"screen"
    assert [type(event) for event in bench.recorder.events] == [RolloutStarted, TurnTaken]


@pytest.mark.parametrize(
    ("error", "stop_reason"),
    [(DeviceError("gone"), StopReason.DEVICE_ERROR), (SamplingError("503"), StopReason.SAMPLING_ERROR)],
)
async def test_a_fault_is_data_without_a_reward_and_keeps_its_turns(error: Exception, stop_reason: StopReason) -> None:
    bench = Bench(FakeAgent([error]))  # type: ignore[list-item]

    rollout = await bench.runner.run(plan())

    assert rollout.stop_reason == stop_reason
    assert rollout.reward is None
    assert len(rollout.turns) == 1
    assert all(device.is_closed for device in bench.devices)
    assert not bench.gateway.open


async def test_a_cancelled_rollout_gives_its_device_back() -> None:
    class Hanging:
        async def run(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    bench = Bench(Hanging())
    running = asyncio.create_task(bench.runner.run(plan()))
    while not bench.devices:
        await asyncio.sleep(0)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.devices[0].is_closed
    assert bench.pool.num_leased == 0
    assert not bench.gateway.open


async def run_groups(bench: Bench, num_groups: int, group_size: int) -> list[RolloutGroup]:
    plan = GroupJob(source=SOURCE, group_size=group_size, params=PARAMS)

    async def end(group: RolloutGroup, _: object) -> RolloutGroup:
        return group

    return await collect_groups([make_task()] * num_groups, partial(run_group, bench.runner, job=plan), end)


async def test_a_faulty_member_is_tried_again_and_the_fault_is_kept_apart() -> None:
    bench = Bench(FakeAgent([DeviceError("gone"), "1", "0"]), max_devices=1)

    (group,) = await run_groups(bench, num_groups=1, group_size=2)

    assert sorted(group.rewards) == [0.0, 1.0]
    assert [rollout.stop_reason for rollout in group.faulty] == [StopReason.DEVICE_ERROR]


async def test_the_pool_never_lends_more_devices_than_it_may() -> None:
    most = 0

    class Counting(FakeAgent):
        async def run(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            most = max(most, bench.pool.num_leased)
            await asyncio.sleep(0.01)
            return await super().run(*args, **kwargs)

    bench = Bench(Counting(["1"]), max_devices=3)
    await run_groups(bench, num_groups=4, group_size=4)

    assert most == 3
    assert len(bench.devices) == 16


class Pausing:
    """An agent whose every turn takes `turn_s` seconds."""

    def __init__(self, turn_s: float, num_turns: int = 1) -> None:
        self._turn_s = turn_s
        self._num_turns = num_turns

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        seen = await device.observe()
        for index in range(self._num_turns):
            await asyncio.sleep(self._turn_s)
            access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=f"resp-{index}"))
            await on_turn(
                AgentTurn(
                    response_id=f"resp-{index}",
                    before=seen,
                )
            )
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=self._num_turns)


def test_a_turn_that_takes_too_long_ends_the_rollout_and_many_short_ones_do_not() -> None:
    limits = DeviceConfig(turn_timeout_s=0.1)

    slow = run_jumping(Bench(Pausing(60.0), time_limits=limits).runner.run(plan()))
    steady = run_jumping(Bench(Pausing(0.03, num_turns=6), time_limits=limits).runner.run(plan()))

    assert (slow.stop_reason, slow.reward) == (StopReason.TIME_LIMIT, None)
    assert slow.error == "expected the device to take at most 0.1 s for a turn, it took longer"
    assert steady.stop_reason == StopReason.FINISHED  # 0.18 s, but no turn took 0.1 s


async def test_a_group_of_which_too_few_survive_is_kept_but_teaches_nothing() -> None:
    faults = [DeviceError("gone")] * MAX_ATTEMPTS
    bench = Bench(FakeAgent([*faults, "1", "0"]), max_devices=1)  # one member faults for good, two survive

    whole = await run_group(bench.runner, make_task(), 0, group_plan(min_group_size=2))
    bench = Bench(FakeAgent([*faults, "1", "0"]), max_devices=1)
    small = await run_group(bench.runner, make_task(), 0, group_plan(min_group_size=3))

    assert score_group(whole, "mean").advantages == (0.5, -0.5)  # centred over the survivors
    assert small.rewards == [1.0, 0.0]
    assert small.is_constant
    assert score_group(small, "mean").advantages == (0.0, 0.0)


def group_plan(min_group_size: int) -> GroupJob:
    return GroupJob(source=SOURCE, group_size=3, params=PARAMS, min_group_size=min_group_size)
