"""The example wrappers, each in an environment of its own: `make test-harnesses` makes those, then runs these tests."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from math import isfinite
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessCommand
from cua_rl.processes import OwnedProcess
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rollout.time_limits import TimeLimits
from cua_rl.types import StopReason
from tests.agent.harness_bench import Bench, open_bench
from tests.documentation.examples import ROOT, read_examples

pytestmark = pytest.mark.timeout(900)

EXAMPLES = ROOT / "examples" / "harnesses"
NAMES = ("browsergym", "gymnasium", "inspect_ai", "openenv", "verifiers")
"""Those that need no other machine."""


def environment(name: str) -> Path:
    """The interpreter of an example; skips the test if nobody has made its environment."""
    python = ROOT / ".harnesses" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of the example {name}; make test-harnesses makes it")
    return python


@pytest.mark.parametrize("name", NAMES)
async def test_the_commands_of_its_page_train_a_step(name: str, tmp_path: Path) -> None:
    environment(name)
    page = read_examples(EXAMPLES / name / "README.md")
    (command,) = [example.words for example in page if example.words[:3] == ["python", "-m", "cua_rl.recipes.train"]]
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
    assert step["rollout/sequences/mean"] == 1


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(small_renderer, tmp_path) as opened:
        yield opened


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
    python, rows = environment("browsergym"), (EXAMPLES / "browsergym" / "tasks.jsonl").read_text().splitlines()
    monkeypatch.setenv("CUA_STEP_LIMIT_S", "5")
    command = AgentCommand(
        argv=(str(python), str(EXAMPLES / "browsergym" / "wrapper.py")),
        log_folder=bench.folder,
        variables=("CUA_STEP_LIMIT_S",),
    )
    call = '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [9, 9]}}'
    bench.fake.default_answer = f"<tool_call>\n{call}\n</tool_call>"
    bench.fake.gate = asyncio.Event()
    limits = TimeLimits(agent_s=60.0)
    running = asyncio.create_task(
        bench.run_program(HarnessCommand(command), row=json.loads(rows[0]), time_limits=limits)
    )
    await asyncio.wait_for(bench.fake.has_arrived.wait(), 60)
    killed = processes_of("r1", victim)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    bench.fake.gate.set()
    rollout = await running

    assert killed
    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)
    assert [processes_of("r1", program) for program in ("chrom", "node", "python")] == [[], [], []]
