"""Rollouts of tasks that a judge decides, and of validated tasks that it is asked about beside the validator."""

from typing import Any

import pytest

from cua_rl.agent.agent import Agent, AgentOutcome
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, FakeJudge, FakeRecorder, make_task


class Speechless:
    """Its first prompt does not fit into the model's context."""

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        return AgentOutcome(stop_reason=StopReason.CONTEXT_OVERFLOW, num_turns=0)


async def run(
    judge: FakeJudge | None,
    *,
    state: str = "0",
    is_validated: bool = False,
    agent: Agent | None = None,
    **options: Any,
) -> Rollout:
    async def make_device(_: object) -> Any:
        return FakeDevice()

    runner = RolloutRunner(
        devices=DevicePool(make_device, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=agent or FakeAgent([state]),
        reward=binary_reward,
        recorder=FakeRecorder(),
        max_turns=5,
        judge=judge,
        **options,
    )
    params = SamplingParams(max_tokens=8, temperature=1.0)
    task = make_task(is_validated=is_validated)
    source = RolloutSource(phase="step", step=0)
    return await runner.run(
        RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=task, params=params)
    )


@pytest.mark.parametrize("says", [True, False])
async def test_a_task_without_a_validator_is_worth_what_the_judge_says(says: bool) -> None:
    judge = FakeJudge(says)

    rollout = await run(judge)

    assert rollout.reward is not None
    assert (rollout.success, rollout.reward.total) == (says, float(says))
    assert rollout.validation is not None
    assert rollout.validation.query == "judge judge-1"
    assert rollout.validation.actual == ("success" if says else "no success") + ", 1 of 1 votes"
    assert rollout.judgement is not None
    assert rollout.judgement.decides
    (case,) = judge.cases
    assert (case.instruction, case.answer, len(case.turns)) == ("Do it.", "done", 1)


async def test_no_verdict_is_a_fault_without_a_reward_that_keeps_its_votes() -> None:
    rollout = await run(FakeJudge(None))

    assert (rollout.stop_reason, rollout.reward, rollout.validation) == (StopReason.TASK_ERROR, None, None)
    assert rollout.error is not None
    assert "503" in rollout.error
    assert rollout.judgement is not None
    assert rollout.judgement.votes[0].error == "503"


@pytest.mark.parametrize("is_validated", [True, False])
async def test_a_rollout_that_ended_before_its_first_turn_failed_and_the_judge_is_not_asked(is_validated: bool) -> None:
    judge = FakeJudge(True)

    rollout = await run(judge, agent=Speechless(), is_validated=is_validated, judge_all=True)

    assert (rollout.stop_reason, rollout.error) == (StopReason.CONTEXT_OVERFLOW, None)
    assert rollout.reward is not None
    assert (rollout.success, rollout.reward.total, rollout.judgement) == (False, 0.0, None)
    assert judge.cases == []


async def test_a_refusal_by_configuration_stops_the_run() -> None:
    with pytest.raises(ConfigError, match="judge_model"):
        await run(FakeJudge(ConfigError("judge_model: expected another")))


async def test_without_a_judge_such_a_task_is_a_fault_that_says_so() -> None:
    rollout = await run(None)

    assert rollout.reward is None
    assert rollout.error is not None
    assert "set judge.base_url and judge.model" in rollout.error


async def test_a_validated_task_is_not_judged_unless_asked_for() -> None:
    judge = FakeJudge(True)

    rollout = await run(judge, is_validated=True)

    assert (judge.cases, rollout.judgement) == ([], None)


@pytest.mark.parametrize("says", [True, None])
async def test_beside_a_validator_the_judge_is_recorded_and_decides_nothing(says: bool | None) -> None:
    rollout = await run(FakeJudge(says), is_validated=True, judge_all=True)

    assert rollout.reward is not None
    assert (rollout.success, rollout.reward.total) == (False, 0.0)
    assert rollout.validation is not None
    assert rollout.validation.query == "state"
    assert rollout.judgement is not None
    assert (rollout.judgement.decides, rollout.judgement.success) == (False, says)


async def test_a_watched_goal_is_not_asked_of_the_judge() -> None:
    judge = FakeJudge(True)

    rollout = await run(judge, watch_goal=True)

    assert rollout.success
    assert len(judge.cases) == 1
