"""Milestones pay once and on the way to the goal: policies that stand still, give up or go in circles gain nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.agent.agent import AgentOutcome
from cua_rl.environments.phone.custom import parse_custom_task
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.rewards.evidence import Evidence
from cua_rl.rewards.load_reward import REWARDS, load_reward
from cua_rl.rewards.reward import RewardFunction, binary_reward, pay_milestones
from cua_rl.rl.advantages import turn_returns
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.types.actions import Action, Button, OpenApp, PressButton, Wait
from cua_rl.types.errors import ConfigError
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import AgentTurn, Reward, Rollout, SamplingParams, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeGateway, FakeRecorder

PHONES = SimulatedPhones()
TASK = replace(TEMPLATES["train_02_enable_wifi"].make_task(4), max_turns=6)
AMOUNT = 0.6
PAYING: Mapping[str, RewardFunction] = {name: pay_milestones(reward, AMOUNT) for name, reward in REWARDS.items()}


@dataclass(frozen=True)
class Scripted:
    """Does these actions on the phone, one a turn, then ends the task if turns are left."""

    actions: Sequence[Action]

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        for index in range(task.max_turns):
            action = self.actions[index] if index < len(self.actions) else None
            response_id = f"resp-{index}"
            access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=response_id))
            seen = await device.observe()
            if action is not None:
                await device.execute(action)
            await on_turn(AgentTurn(response_id=response_id, before=seen, action=action))
            if action is None:
                return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=index + 1)
        return AgentOutcome(stop_reason=StopReason.MAX_TURNS, num_turns=task.max_turns)


async def play(*actions: Action) -> tuple[Rollout, Evidence]:
    """The rollout, and what reward functions are told about it."""
    told: list[Evidence] = []

    def look(evidence: Evidence) -> Reward:
        told.append(evidence)
        return binary_reward(evidence)

    runner = RolloutRunner(
        devices=DevicePool(PHONES.make, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=Scripted(actions),  # type: ignore[arg-type]
        reward=look,
        recorder=FakeRecorder(),
        max_turns=6,
        watch_goal=True,
    )
    params, source = SamplingParams(max_tokens=8, temperature=1.0), RolloutSource(phase="step", step=1)
    job = RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=TASK, params=params)
    return await runner.run(job), told[0]


SETTINGS, HOME, WAIT = OpenApp(name="Settings"), PressButton(button=Button.HOME), Wait(duration_s=1.0)


async def test_a_turn_that_reaches_a_screen_of_the_way_earns_its_share_once() -> None:
    _, circling = await play(WAIT, SETTINGS, HOME, SETTINGS, HOME, SETTINGS)

    # the home screen is there from the start; Settings is the only milestone left
    assert circling.milestone_turns == (0, 2)
    for name, reward in PAYING.items():
        assert reward(circling).of_turns == (0.0, AMOUNT, 0.0, 0.0, 0.0, 0.0), name
        assert reward(circling).total == pytest.approx(REWARDS[name](circling).total + AMOUNT), name


@pytest.mark.parametrize("discount", [1.0, 0.8])
async def test_policies_that_cheat_gain_nothing_with_any_reward(discount: float) -> None:
    standing, gave_up = await play(*[WAIT] * 6), await play()
    touched, stayed = await play(SETTINGS), await play(SETTINGS, *[WAIT] * 5)
    circling = await play(*[SETTINGS, HOME] * 3)

    for name, reward in PAYING.items():

        def earned(played: tuple[Rollout, Evidence], reward: RewardFunction = reward) -> float:
            rollout, evidence = played
            assert not rollout.success
            return turn_returns(replace(rollout, reward=reward(evidence)), discount)[0]

        assert not any((*reward(standing[1]).of_turns, *reward(gave_up[1]).of_turns)), name
        # after a milestone: ending at once, staying, or reaching it again earns no more than any way to go on
        assert earned(touched) <= earned(circling) + 1e-9, name
        assert earned(stayed) <= earned(circling) + 1e-9, name
        assert earned(standing) <= earned(stayed), name
        assert earned(gave_up) <= earned(touched), name


@st.composite
def milestone_turns(draw: st.DrawFn, num_turns: int) -> tuple[int | None, ...]:
    reached = st.none() | st.integers(0, num_turns)
    return tuple(draw(st.lists(reached, min_size=1, max_size=4)))


def ended(success: bool, num_turns: int, reached: Sequence[int | None]) -> Evidence:
    return Evidence(
        validation=Validation(query="q", expected="1", actual="?", success=success),
        stop_reason=StopReason.FINISHED,
        num_turns=num_turns,
        max_turns=10,
        num_actions=num_turns,
        num_new_actions=num_turns,
        milestone_turns=tuple(reached),
    )


@given(st.data())
def test_no_unsolved_task_earns_more_by_milestones_than_a_solved_one(data: st.DataObject) -> None:
    num_turns, solved_in = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 10))
    missed = data.draw(milestone_turns(num_turns))
    solved = [0 if turn == 0 else data.draw(st.none() | st.integers(1, solved_in)) for turn in missed]

    for name, reward in PAYING.items():
        assert reward(ended(True, solved_in, solved)).total > reward(ended(False, num_turns, missed)).total, name


@given(st.data())
def test_going_on_never_takes_a_milestone_back(data: st.DataObject) -> None:
    num_turns, more = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 2))
    reached = data.draw(milestone_turns(num_turns))
    later = [
        data.draw(st.none() | st.integers(num_turns + 1, num_turns + more)) if more and turn is None else turn
        for turn in reached
    ]

    for name, reward in PAYING.items():
        stopped, went_on = reward(ended(False, num_turns, reached)), reward(ended(False, num_turns + more, later))
        assert stopped.total <= went_on.total + 1e-9, name
        assert went_on.of_turns[:num_turns] == stopped.of_turns[: len(went_on.of_turns)], name


def test_a_way_around_the_milestones_costs_nothing() -> None:
    reward = pay_milestones(binary_reward, AMOUNT)

    # three milestones can be reached: the first with turn 1, the others, missed on the way, with the last turn
    solved = reward(ended(True, 3, (1, None, None, 0)))

    assert solved.of_turns == pytest.approx((0.2, 0.0, 0.4))
    assert (solved.total, solved.parts) == (1.6, {"success": 1.0, "milestones": AMOUNT})
    assert reward(ended(True, 3, (0, 0))) == binary_reward(ended(True, 3, ()))  # nothing to reach


def test_what_a_function_of_the_users_pays_for_turns_is_added_to() -> None:
    def own(_: Evidence) -> Reward:
        return Reward(total=1.0, parts={"speed": 1.0}, of_turns=(0.5, 0.0))

    paid = pay_milestones(own, AMOUNT)(ended(True, 2, (2,)))
    assert (paid.total, paid.of_turns) == (1.6, (0.5, AMOUNT))


def test_a_clip_bounds_the_reward_without_its_milestones() -> None:
    assert load_reward("comprehensive", 0.5, 0.6)(ended(True, 2, (1,))).total == pytest.approx(1.1)


def test_every_demo_task_has_milestones_that_begin_with_where_it_starts() -> None:
    for template in TEMPLATES.values():
        instance = template.instance(0)
        assert instance.milestones or all(not move.screen for move in instance.route), template.task_id
        assert len(template.make_task(0).milestones) == len(instance.milestones)


def test_a_described_task_has_its_own_milestones() -> None:
    described = {
        "instruction": "Turn on Wi-Fi.",
        "check": {"query": "wifi_enabled", "expected": True},
        "milestones": [{"query": "current_app", "expected": "com.android.settings"}],
    }
    (made,) = parse_custom_task(described, "task 1", PHONES.abilities).make_task(0).milestones

    assert made.args[0].expected == "com.android.settings"
    told = [{"query": "battery_level", "how": "told"}]
    with pytest.raises(ConfigError, match=re.escape("milestones of task 1 that a device's state shows")):
        parse_custom_task({**described, "milestones": told}, "task 1", PHONES.abilities)
