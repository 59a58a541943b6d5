"""The example wrappers, each in an environment of its own: `make test-harnesses` makes those, then runs these tests."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessCommand
from cua_rl.environments.config import DeviceConfig
from cua_rl.host.processes import OwnedProcess
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.agent.harness_bench import Bench, open_bench
from tests.documentation.examples import ROOT, read_examples
from tests.patience import patience

pytestmark = pytest.mark.timeout(900)

EXAMPLES = ROOT / "examples" / "harnesses"
NAMES = ("browsergym", "gymnasium", "harbor", "inspect_ai", "openenv", "verifiers")
"""Those that need no other machine."""
PAGES = (*(EXAMPLES / name / "README.md" for name in NAMES), ROOT / "docs" / "web.md")
"""Each has one command that trains one step with the tiny model."""


def environment(name: str) -> Path:
    """The interpreter of an example; skips the test if nobody has made its environment."""
    python = ROOT / ".harnesses" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of the example {name}; make test-harnesses makes it")
    return python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
async def test_the_commands_of_its_page_train_a_step(page: Path, tmp_path: Path) -> None:
    if page.is_relative_to(EXAMPLES):
        environment(page.parent.name)
    begin, one_step = ["python", "-m", "cua_rl.recipes.train"], "max_steps=1"
    words = [example.words for example in read_examples(page) if example.kind == "command"]
    (command,) = [command for command in words if command[:3] == begin and one_step in command]
    log_path = tmp_path / "train.log"
    argv = [sys.executable, *command[1:], f"log_path={tmp_path / 'run'}"]

    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    async with OwnedProcess(argv, name="train", log_path=log_path, environment=variables) as process:
        assert await process.wait() == 0, process.log_tail()

    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert isfinite(step["loss/total"])
    assert step["rollout/trained_tokens"] > 0
    assert step["rollout/retokenised_tokens"] == 0
    assert step["rollout/num_faults"] == 0
    # at this temperature, a model that knows little now and then writes a text in other tokens than its tokenizer
    num_datums, num_forks = step["rollout/num_datums"], step.get("rollout/forks/answer_retokenised", 0)
    assert step["rollout/sequences/mean"] * (num_datums - num_forks) == num_datums


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    params = SamplingParams(max_tokens=600, temperature=1.0)  # its tokens are bytes
    async with open_bench(small_renderer, tmp_path, params=params, max_model_len=64_000) as opened:
        yield opened


async def play(bench: Bench, name: str, row: dict[str, Any], *answers: str) -> Rollout:
    """One rollout of an example with scripted answers of the model."""
    bench.fake.answers.extend(answers)
    command = AgentCommand(argv=(str(environment(name)), str(EXAMPLES / name / "wrapper.py")), log_folder=bench.folder)
    return await bench.run_program(HarnessCommand(command), row=row)


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / name / "tasks.jsonl").read_text().splitlines()]


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "number", "tool", "place"),
    [
        ("browsergym", 1, "computer_use", [149, 779]),  # the purple box
        ("gymnasium", 0, "mobile_use", [760, 602]),
        ("inspect_ai", 0, "mobile_use", None),
    ],
)
async def test_what_the_model_gets_wrong_is_no_fault_and_a_hit_is_a_success(
    name: str, number: int, tool: str, place: list[int] | None, bench: Bench
) -> None:
    def click(at: list[Any]) -> str:
        return call(tool, action="click", coordinate=at)

    wrong = [click(at) for at in ([5], ["a", 1], [1, 10**400])]
    right = [click(place)] if place else [click([x, y]) for x in (200, 400, 600, 800) for y in (200, 400, 600, 800)]

    rollout = await play(
        bench, name, rows_of(name)[number] | {"max_turns": 30}, "Hm.", *wrong, *right, call("submit", answer="done")
    )

    assert (rollout.error, rollout.success) == (None, True)
    assert rollout.reward is not None
    assert rollout.reward.total >= 0.8


async def test_an_episode_of_verifiers_that_is_not_ok_is_a_fault_though_it_has_a_reward(bench: Bench) -> None:
    row = rows_of("verifiers")[0]
    row["payload"]["env"]["taskset"]["task"]["rewards"]["brevity"]["fn"] = "json:loads"  # cannot be called like this

    rollout = await play(bench, "verifiers", row, *["[E]"] * 20)

    assert (rollout.stop_reason, rollout.reward) == (StopReason.DEVICE_ERROR, None), rollout.error


async def test_osworlds_own_package_scores_a_task_on_a_scripted_machine(bench: Bench, tmp_path: Path) -> None:
    """Its environment takes several GB: `examples/harnesses/make_environment.sh osworld`."""
    config = {
        "id": "note",
        "instruction": "Type milk.",
        "config": [{"type": "execute", "parameters": {"command": ["true"]}}],
        "evaluator": {
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": ["cat", "note"]},
            "expected": {"type": "rule", "rules": {"expected": "milk"}},
        },
    }
    machine = {"provider_name": "docker", "headless": True, "screen_size": [160, 96]}
    with TemporaryDirectory(prefix="osworld-") as folder:  # unlike pytest's, one that every user can be let into
        Path(folder).chmod(0o755)
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(config))
        runner, wrapper = (
            ROOT / "tests" / "doubles" / "osworld_machine.py",
            EXAMPLES / "osworld" / "wrapper.py",
        )
        command = AgentCommand(argv=(str(environment("osworld")), str(runner), str(wrapper)), log_folder=bench.folder)
        bench.fake.answers.append(call("computer_use", action="type", text="milk"))
        bench.fake.answers.append(call("computer_use", action="terminate", status="success"))
        row = {"task_id": "note", "payload": {"config": str(path), "pause": 0.1, "machine": machine}}
        rollout = await bench.run_program(HarnessCommand(command), row=row)

    assert (rollout.error, rollout.success, len(rollout.turns)) == (None, True, 2)


def processes_of(rollout_id: str, program: str) -> list[int]:
    """Of a rollout, those that run this program."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_its = f"CUA_ROLLOUT_ID={rollout_id}".encode() in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_its and program in Path(words[0].decode(errors="replace")).name:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("victim", ["chrom", "node"])
async def test_a_browser_or_driver_that_is_killed_is_a_fault_and_leaves_nothing(
    victim: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment("browsergym")
    monkeypatch.setenv("CUA_STEP_LIMIT_S", "20")
    command = AgentCommand(
        argv=(str(python), str(EXAMPLES / "browsergym" / "wrapper.py")),
        log_folder=bench.folder,
        variables=("CUA_STEP_LIMIT_S",),
    )
    bench.fake.default_answer = call("computer_use", action="left_click", coordinate=[9, 9])
    bench.fake.gate = asyncio.Event()
    limits = DeviceConfig(task_timeout_s=60.0)
    running = asyncio.create_task(
        bench.run_program(HarnessCommand(command), row=rows_of("browsergym")[0], time_limits=limits)
    )
    await asyncio.wait_for(bench.fake.has_arrived.wait(), patience(60))
    killed = processes_of("r1", victim)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    bench.fake.gate.set()
    rollout = await running

    assert killed
    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)
    assert [processes_of("r1", program) for program in ("chrom", "node", "python")] == [[], [], []]
