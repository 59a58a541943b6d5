"""The example wrappers of AndroidWorld and OSWorld in their own loops, on scripted doubles of the two packages."""

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessCommand
from cua_rl.environments.config import DeviceConfig
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.types.rollout import Rollout, StopReason
from tests.agent.harness_bench import Bench, open_bench, run_out_of_time
from tests.documentation.examples import ROOT

WORLDS = ROOT / "tests" / "doubles" / "worlds"
"""Programs of root's run as users of their own, who reach no temporary folder of root's."""


@pytest_asyncio.fixture
async def bench(
    small_renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(WORLDS))
    async with open_bench(small_renderer, tmp_path) as opened:
        yield opened


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def run(
    bench: Bench,
    name: str,
    payload: dict[str, Any],
    *answers: str,
    limits: DeviceConfig | None = None,
    max_turns: int = 5,
) -> Rollout:
    wrapper = ROOT / "examples" / "harnesses" / name / "wrapper.py"
    command = AgentCommand(argv=(sys.executable, str(wrapper)), log_folder=bench.folder, variables=("PYTHONPATH",))
    bench.fake.answers.extend(answers)
    return await bench.run_program(
        HarnessCommand(command),
        row={"task_id": "task", "seed": 3, "max_turns": max_turns, "payload": payload},
        time_limits=limits,
    )


async def android(
    bench: Bench,
    *answers: str,
    task: str = "PressTheButton",
    script: str = "adb",
    limits: DeviceConfig | None = None,
    max_turns: int = 5,
) -> Rollout:
    payload = {"task": task, "console_port": 5554, "adb_path": script, "pause": 0.0}
    return await run(bench, "android_world", payload, *answers, limits=limits, max_turns=max_turns)


async def osworld(bench: Bench, *answers: str, script: str = "docker", limits: DeviceConfig | None = None) -> Rollout:
    machine = {"provider_name": script, "headless": True, "screen_size": [160, 96]}
    payload = {"config": str(WORLDS / "osworld_task.json"), "machine": machine}
    return await run(bench, "osworld", payload, *answers, limits=limits)


def outcome(rollout: Rollout) -> tuple[StopReason, float | None]:
    return rollout.stop_reason, None if rollout.reward is None else rollout.reward.total


async def test_an_android_world_task_is_scored_by_the_phones_state(bench: Bench) -> None:
    # seed 3: random.Random(3).randrange(0, 216) == 60, so the button is from 250 to 350 of 1000
    done = call("mobile_use", action="terminate", status="success")
    hit = await android(bench, "What?", call("mobile_use", action="click", coordinate=[500, 300]), done)
    missed = await android(bench, call("mobile_use", action="click", coordinate=[500, 900]), done)

    assert outcome(hit) == (StopReason.FINISHED, 1.0), hit.error
    assert [len(turn.model.prompt.images) for turn in hit.turns] == [1, 1, 2]
    assert outcome(missed) == (StopReason.FINISHED, 0.0)
    assert "closed" in bench.log()


async def test_an_android_world_task_ends_after_its_own_number_of_steps(bench: Bench) -> None:
    rollout = await android(bench, *(call("mobile_use", action="wait") for _ in range(9)))

    assert (outcome(rollout), len(rollout.turns)) == ((StopReason.FINISHED, 0.0), 3)  # complexity 0.3


NONSENSE: tuple[dict[str, Any], ...] = (
    {"action": "type", "text": 5},
    {"action": "open_app", "text": ["Clock"]},
    {"action": "answer", "text": {}},
    {"action": "scroll", "direction": ""},
    {"action": "scroll", "direction": 7},
    {"action": "system_button", "button": []},
    {"action": "click", "coordinate": [1]},
    {"action": "click", "coordinate": "no"},
    {"action": "click", "coordinate": None},
)


async def test_what_a_model_writes_into_a_call_is_never_a_fault(bench: Bench) -> None:
    calls = [call("mobile_use", **arguments) for arguments in NONSENSE]
    done = call("mobile_use", action="terminate", status="failure")
    rollout = await android(bench, *calls, done, task="PressItInTime", max_turns=20)

    assert outcome(rollout) == (StopReason.FINISHED, 0.0), rollout.error
    assert len(rollout.turns) == len(NONSENSE) + 1


async def test_an_osworld_task_is_scored_by_its_own_evaluator(bench: Bench) -> None:
    typed = call("computer_use", action="type", text="milk")
    done = call("computer_use", action="terminate", status="success")
    right = await osworld(bench, call("computer_use", action="dance"), typed, done)
    gave_up = await osworld(bench, typed, call("computer_use", action="terminate", status="failure"))
    ran_out = await osworld(bench, *[typed] * 5)

    assert outcome(right) == (StopReason.FINISHED, 1.0), right.error
    assert outcome(gave_up) == (StopReason.FINISHED, 0.0)
    assert outcome(ran_out) == (StopReason.MAX_TURNS, 1.0)
    assert "closed" in bench.log()


@pytest.mark.parametrize("script", ["not set up", "lost at the end"])
async def test_what_osworld_only_logs_is_a_fault(script: str, bench: Bench) -> None:
    rollout = await osworld(bench, call("computer_use", action="terminate", status="success"), script=script)

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)


@pytest.mark.parametrize(("run_one", "tool"), [(android, "mobile_use"), (osworld, "computer_use")])
async def test_a_machine_that_is_lost_is_a_fault_and_one_that_hangs_uses_up_the_time_of_its_program(
    run_one: Any, tool: str, bench: Bench
) -> None:
    typed = call(tool, action="type", text="milk")
    lost = await run_one(bench, typed, script="lost")
    # it hangs where the other lost its machine, so it comes that far in about the same time
    hangs = await run_out_of_time(
        bench, lambda limits: run_one(bench, typed, script="hangs", limits=limits), first_s=1.5 * lost.duration_s
    )

    assert outcome(lost) == (StopReason.TASK_ERROR, None)
    assert outcome(hangs) == (StopReason.MAX_TIME, 0.0)  # the program did not bound its wait, nor report a fault
