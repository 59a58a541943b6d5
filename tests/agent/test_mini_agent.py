"""gbox-mini-agent on a gym server, both as doubles, through a real gateway with a fake model server."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from cua_rl.agent.mini_agent_reports import ReportedAction, parse_mini_agent_action
from cua_rl.environments.config import DeviceConfig
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.types.actions import Click, Drag, PressButton, Scroll, TypeText, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import StopReason
from tests.agent.gym_bench import GymBench, call, open_bench


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer) -> AsyncGenerator[GymBench]:
    async with open_bench(small_renderer) as bench:
        yield bench


async def test_turns_have_the_gateways_tokens_and_screens_and_the_agents_actions(bench: GymBench) -> None:
    bench.fake.answers.extend([call(action="click", coordinate=[500, 500]), call(action="answer", text="83")])

    rollout = await bench.run()

    assert rollout.error is None
    assert (rollout.stop_reason, rollout.answer) == (StopReason.FINISHED, "83")
    first, last = rollout.turns
    assert first.agent.action == Click(x=96, y=160)  # the middle of 192 x 320 pixels
    assert (first.agent.before.width_px, first.agent.before.height_px) == (192, 320)
    assert first.agent.before.sha256 == first.model.prompt.images[-1].sha256
    assert first.agent.after is not None
    assert first.agent.after.sha256 == last.agent.before.sha256 == last.model.prompt.images[-1].sha256
    assert len(first.model.sampled_tokens) == len(first.model.sampling_logprobs) > 10
    assert (last.agent.action, last.agent.after) == (None, None)


async def test_the_gym_is_told_the_answer_and_its_score_is_the_reward(bench: GymBench) -> None:
    bench.fake.answers.append(call(action="answer", text="83"))
    bench.gym.evaluation = {
        "success": False,
        "result": {"score": 0, "validators": [{"score": 1, "weight": 3}, {"score": 0, "weight": 1, "pass": False}]},
    }

    rollout = await bench.run()

    (execution,) = bench.gym.executions.values()
    (told,) = execution.evaluations
    assert told["answer_text"] == "83"
    assert (told["execution_data"]["num_turns"], told["execution_data"]["max_turns"]) == (1, 3)
    assert rollout.reward is not None
    assert rollout.reward.total == 0.75  # (1 x 3 + 0 x 1) / 4
    assert rollout.success is False
    assert execution.num_terminations == 1


async def test_an_agent_that_reports_one_output_only_loses_no_turn(bench: GymBench) -> None:
    bench.mini.reports_one_output = True
    bench.fake.answers.extend([call(action="click", coordinate=[0, 0]), call(action="wait", time=1)])
    bench.fake.default_answer = call(action="terminate", status="success")

    rollout = await bench.run()

    assert rollout.error is None
    assert len(rollout.turns) == 3
    assert [turn.agent.action for turn in rollout.turns] == [Click(x=0, y=0), None, None]
    assert all(turn.agent.before.sha256 == turn.model.prompt.images[-1].sha256 for turn in rollout.turns)


@pytest.mark.parametrize("has_events", [True, False])
async def test_a_run_out_of_steps_ends_without_a_fault_even_if_nothing_is_ever_reported(
    bench: GymBench, has_events: bool
) -> None:
    bench.mini.has_events = has_events
    bench.fake.default_answer = call(action="wait", time=0)

    rollout = await bench.run()

    assert (rollout.stop_reason, len(rollout.turns)) == (StopReason.MAX_TURNS, 3)
    assert rollout.reward is not None


async def test_a_hung_run_is_a_fault_that_frees_its_device(bench: GymBench) -> None:
    bench.mini.hangs_after_steps = 1
    bench.fake.default_answer = call(action="wait", time=0)

    rollout = await bench.run()

    assert (rollout.stop_reason, rollout.reward) == (StopReason.TIME_LIMIT, None)
    assert "showed no progress" in (rollout.error or "")
    assert bench.gym.num_open == 0


async def test_a_run_that_takes_its_time_ends_as_with_its_steps_used_up(small_renderer: Qwen3VLRenderer) -> None:
    for agent_s in (1.0, 4.0, 16.0):  # the shortest in which it takes a step, however busy the machine
        async with open_bench(small_renderer, time_limits=DeviceConfig(task_timeout_s=agent_s), slack_s=60.0) as bench:
            bench.mini.hangs_after_steps = 1
            bench.fake.default_answer = call(action="wait", time=0)

            rollout = await bench.run()
        if rollout.turns:
            break

    assert (rollout.stop_reason, len(rollout.turns)) == (StopReason.MAX_TIME, 1)
    assert rollout.reward is not None


async def test_a_busy_server_is_asked_again_and_a_broken_one_is_a_fault(bench: GymBench) -> None:
    bench.fake.default_answer = call(action="terminate", status="success")
    bench.mini.start_failures.extend([429, 503])
    bench.mini.poll_failures.extend([500, 500])

    asked_again = await bench.run()
    bench.mini.start_failures.append(500)
    broken = await bench.run()

    assert asked_again.error is None
    assert (broken.stop_reason, broken.reward) == (StopReason.TASK_ERROR, None)


async def test_what_breaks_down_under_the_agent_is_no_reward(bench: GymBench) -> None:
    bench.mini.breaks_down = True
    bench.fake.default_answer = call(action="wait", time=0)
    device_lost = await bench.run()
    bench.mini.breaks_down = False
    bench.fake.failures.append(500)
    model_lost = await bench.run()

    assert (device_lost.stop_reason, device_lost.reward) == (StopReason.TASK_ERROR, None)
    assert "the device went away" in (device_lost.error or "")
    assert (model_lost.stop_reason, model_lost.reward) == (StopReason.SAMPLING_ERROR, None)


def test_actions_are_read_whatever_the_range_of_their_coordinates() -> None:
    screen = EncodedImage(data=b"", format="png", width_px=200, height_px=100)

    def read(name: str, **args: object) -> object:
        return parse_mini_agent_action(ReportedAction(name=name, args=args), screen)

    assert read("click", point={"x": 0.5, "y": 0.5}) == Click(x=100, y=50)
    assert read("tap", point=[500, 1000]) == Click(x=100, y=99)
    assert read("swipe", startPoint=[0.1, 0.2], endPoint=[0.1, 0.8], durationMs=500) == Drag(
        x=20, y=20, to_x=20, to_y=80, duration_s=0.5
    )
    assert read("scroll", direction="down") == Scroll(x=100, y=50, down_px=30)
    assert read("type", content="hi") == TypeText(text="hi")
    assert read("press_home") == PressButton(button="home")  # type: ignore[arg-type]
    assert read("dance") is None
    assert read("tap", point=[1.7e308, 1.7e308]) is None
    assert read("wait", durationMs=10**400) == Wait(duration_s=1.0)
