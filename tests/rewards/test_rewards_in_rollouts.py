from typing import Any

import pytest

from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.metrics import check_names
from cua_rl.rewards.evidence import Evidence
from cua_rl.rewards.load_reward import REWARDS
from cua_rl.rewards.reward import RewardFunction, binary_reward, comprehensive_reward
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.types.errors import DeviceError
from cua_rl.types.rollout import Reward, Rollout, SamplingParams
from tests.builders import group
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, FakeRecorder, make_task


async def run(agent: Any, reward: RewardFunction, *, watch_goal: bool = False) -> Rollout:
    async def make_device(_: object) -> Any:
        return FakeDevice()

    runner = RolloutRunner(
        devices=DevicePool(make_device, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=agent,
        reward=reward,
        recorder=FakeRecorder(),
        max_turns=5,
        watch_goal=watch_goal,
    )
    params = SamplingParams(max_tokens=8, temperature=1.0)
    source = RolloutSource(phase="step", step=1)
    plan = RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=make_task(), params=params)
    return await runner.run(plan)


class Undoing(FakeAgent):
    """Reaches the goal, takes a turn, then undoes it and takes another."""

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> Any:
        device.state = "1"
        await super().run(task, device, access, clock=clock, on_turn=on_turn)
        return await super().run(task, device, access, clock=clock, on_turn=on_turn)


@pytest.mark.parametrize(("watch_goal", "first_success_turn"), [(True, 1), (False, None)])
async def test_a_watched_rollout_knows_when_the_goal_first_held(
    watch_goal: bool, first_success_turn: int | None
) -> None:
    seen: list[Evidence] = []

    def look(evidence: Evidence) -> Reward:
        seen.append(evidence)
        return binary_reward(evidence)

    rollout = await run(Undoing(["0"]), look, watch_goal=watch_goal)

    assert not rollout.success
    assert [(facts.first_success_turn, facts.num_turns, facts.max_turns) for facts in seen] == [
        (first_success_turn, 2, 3)
    ]


async def test_a_fault_never_reaches_the_reward() -> None:
    def refuse(evidence: Evidence) -> Reward:
        raise AssertionError(evidence)

    assert (await run(FakeAgent([DeviceError("gone")]), refuse)).reward is None


async def test_the_means_of_the_parts_add_up_to_the_mean_reward() -> None:
    agent = FakeAgent(["1", "0", "0"])
    rollouts = [await run(agent, comprehensive_reward) for _ in range(3)]

    metrics = rollout_metrics([group(*rollouts)])

    check_names(metrics)
    parts = {name: value for name, value in metrics.items() if name.startswith("reward/parts/")}
    assert sum(parts.values()) == pytest.approx(metrics["reward/mean"])
    assert parts["reward/parts/success"] == pytest.approx(1.5 / 3)


@pytest.mark.parametrize("name", REWARDS)
async def test_every_part_has_a_metric_name(name: str) -> None:
    rollout = await run(FakeAgent(["1"]), REWARDS[name])

    check_names(rollout_metrics([group(rollout)]))
