"""A check that fails itself is held against a fresh device, which tells whose doing that is."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from cua_rl.agent.device_step import perform
from cua_rl.environments.config import DeviceConfig
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click
from cua_rl.types.errors import AbsentError, CheckError, ConfigError, DeviceError, TaskError, UnusableError
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import Rollout, StopReason
from tests.builders import judgement
from tests.fakes import FakeAgent, FakeDevice, make_task
from tests.rollout.test_run import PARAMS, SOURCE, Bench, plan

YES, NO = JudgeVote(success=True), JudgeVote(success=False)
MALFORMED = JudgeVote(success=None, error="no JSON", is_malformed=True)
AWAY = JudgeVote(success=None, error="503")


async def read_json(device: Any, answer: str | None) -> Validation:
    actual = await device.query("state")
    return Validation(query="state", expected="1", actual=actual, success=json.loads(actual) == 1)


def task_with(validate: Any) -> Task:
    return replace(make_task(), validate=validate)


async def run(bench: Bench, task: Task) -> Rollout:
    return await bench.runner.run(replace(plan(), task=task))


def outcome(rollout: Rollout) -> tuple[StopReason, float | None]:
    return rollout.stop_reason, None if rollout.reward is None else rollout.reward.total


@pytest.mark.parametrize("error", [AbsentError("no element '#q'"), UnusableError("the page hangs")])
async def test_what_is_absent_or_hangs_when_it_is_read_is_not_done(error: Exception) -> None:
    async def validate(device: Any, answer: str | None) -> Validation:
        raise error

    bench = Bench(FakeAgent(["1"]))
    rollout = await run(bench, task_with(validate))

    assert outcome(rollout) == (StopReason.FINISHED, 0.0)
    assert rollout.validation is not None
    assert rollout.validation.actual == str(error)
    assert len(bench.devices) == 1  # no fresh one is needed


async def test_a_check_that_fails_on_what_the_policy_left_is_not_done_and_one_trial_serves_its_group() -> None:
    bench = Bench(FakeAgent(["{", "1", "{", "{"]))

    group = await run_group(bench.runner, task_with(read_json), 0, GroupJob(source=SOURCE, group_size=4, params=PARAMS))

    assert sorted(group.rewards) == [0.0, 0.0, 0.0, 1.0]
    assert not group.faulty
    assert len(bench.devices) == 5
    failed = next(rollout for rollout in group.rollouts if not rollout.success)
    assert failed.validation is not None
    assert "JSONDecodeError" in failed.validation.actual


async def test_a_check_that_fails_on_a_fresh_device_too_is_broken_and_stops_the_run() -> None:
    async def validate(device: Any, answer: str | None) -> Validation:
        raise KeyError("total")

    with pytest.raises(ConfigError, match=r"the check of 'task' .* KeyError: 'total'; correct the check"):
        await run(Bench(FakeAgent(["1"])), task_with(validate))


async def test_a_check_that_has_worked_and_fails_everywhere_now_is_a_fault() -> None:
    """Its server is away: neither the policy nor the check is to blame."""
    is_away = False

    async def validate(device: Any, answer: str | None) -> Validation:
        if is_away:
            raise ConnectionError("refused")
        return await read_json(device, answer)

    bench = Bench(FakeAgent(["1"]))
    assert outcome(await run(bench, task_with(validate))) == (StopReason.FINISHED, 1.0)
    is_away = True
    assert outcome(await run(bench, task_with(validate))) == (StopReason.TASK_ERROR, None)


async def test_without_a_fresh_device_nobody_knows_and_it_is_a_fault() -> None:
    class Scarce(Bench):
        async def _make(self, task: object) -> Any:
            if self.devices:
                raise DeviceError("no more")
            return await super()._make(task)

    bench = Scarce(FakeAgent(["{"]))
    bench.pool._limits = replace(bench.pool._limits, retry_first_s=0.0)

    assert outcome(await run(bench, task_with(read_json))) == (StopReason.DEVICE_ERROR, None)


async def test_a_check_that_never_ends_on_what_the_policy_left_is_not_done() -> None:
    async def validate(device: Any, answer: str | None) -> Validation:
        if await device.query("state") == "endless":
            await asyncio.Event().wait()
        return await read_json(device, answer)

    bench = Bench(FakeAgent(["endless"]), time_limits=DeviceConfig(validate_timeout_s=0.05))
    rollout = await run(bench, task_with(validate))

    assert outcome(rollout) == (StopReason.FINISHED, 0.0)
    assert rollout.validation is not None
    assert rollout.validation.actual == "expected validation to take at most 0.05 s, it took longer"


async def test_a_check_that_fails_half_way_does_not_end_the_rollout() -> None:
    """With `watch_goal` it is asked after every turn, when what it reads may not be there yet."""
    num_asked = 0

    async def validate(device: Any, answer: str | None) -> Validation:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise FileNotFoundError("note.txt")
        return await read_json(device, answer)

    bench = Bench(FakeAgent(["1"]))
    runner = replace(bench.runner, watch_goal=True)

    assert outcome(await runner.run(replace(plan(), task=task_with(validate)))) == (StopReason.FINISHED, 1.0)


async def test_a_check_that_fails_while_the_device_is_prepared_is_broken() -> None:
    """Tasks in folders ask their validator before the agent starts."""

    async def prepare(device: Any) -> None:
        raise CheckError("validate task 'task': NameError")

    with pytest.raises(ConfigError, match="NameError"):
        await run(Bench(FakeAgent(["1"])), replace(make_task(), prepare=prepare))


async def test_a_failure_to_prepare_stays_a_fault() -> None:
    async def prepare(device: Any) -> None:
        raise TaskError("the goal cannot be undone")

    rollout = await run(Bench(FakeAgent(["1"])), replace(make_task(), prepare=prepare))

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)


async def test_an_action_after_which_the_device_hangs_ends_the_rollout_and_is_validated() -> None:
    class Hanging(FakeDevice):
        async def observe(self) -> Any:
            raise UnusableError("the page hangs")

    step = await perform(Hanging(), Click(x=1, y=1))

    assert (step.is_last, step.after, step.error) == (True, None, "the page hangs")


@pytest.mark.parametrize(
    ("votes", "ended"),
    [
        ((YES, NO), (StopReason.FINISHED, 0.0)),  # divided: nothing is missing that would come with another request
        ((YES, MALFORMED), (StopReason.FINISHED, 0.0)),
        ((YES, AWAY), (StopReason.TASK_ERROR, None)),
        ((MALFORMED, MALFORMED), (StopReason.TASK_ERROR, None)),  # this may be no judge at all
    ],
)
async def test_a_judge_that_what_it_saw_leaves_undecided_has_not_seen_a_success(
    votes: tuple[JudgeVote, ...], ended: tuple[StopReason, float | None]
) -> None:
    class Undecided:
        async def judge(self, case: object, *, decides: bool) -> Judgement:
            return judgement(*votes, decides=decides)

    runner = replace(Bench(FakeAgent(["1"])).runner, judge=Undecided())
    rollout = await runner.run(replace(plan(), task=make_task(is_validated=False)))

    assert outcome(rollout) == ended
