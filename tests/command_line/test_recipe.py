"""Exit status, messages and signals of recipes, each in a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
import asyncio, os, sys
from contextlib import asynccontextmanager
import chz
from cua_rl.errors import TrainingError
from cua_rl.command_line.recipe import run_recipe

@chz.chz
class Config:
    mode: str = chz.field(default="done", doc="what to do")
    size: int = chz.field(default=1, doc="a number")

@asynccontextmanager
async def owned():
    try:
        yield
    finally:
        await asyncio.sleep(0)
        print("unwound", flush=True)

async def fail():
    raise TrainingError("expected a finite loss, got nan; lower the learning rate")

async def main(config):
    async with owned():
        print("running", os.environ.get("CUA_A"), os.environ.get("CUA_B"), flush=True)
        if config.mode == "fail":
            await fail()
        if config.mode == "fail_in_group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        if config.mode == "bug":
            raise RuntimeError("a bug")
        if config.mode == "wait":
            await asyncio.Event().wait()

sys.exit(run_recipe(Config, main))
"""


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RECIPE, *argv],
        cwd=folder,
        env={"CUA_A": "environment", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_recipe_that_ends_has_status_0_and_reads_env_without_overriding(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CUA_A=file\nCUA_B=file\n")

    process = start(tmp_path)
    output, errors = process.communicate(timeout=120)

    assert process.returncode == 0, errors
    assert output.splitlines() == ["running environment file", "unwound"]


def test_a_wrong_setting_has_status_2_a_message_in_parts_and_no_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "size=four")
    output, errors = process.communicate(timeout=120)

    assert process.returncode == 2
    assert output == ""
    assert errors.splitlines() == [
        "configuration error: expected size to be a whole number (a number)",
        "    got 'four'",
        "    for example size=1",
    ]


@pytest.mark.parametrize("mode", ["fail", "fail_in_group"])
def test_an_error_of_ours_has_status_1_and_no_traceback(tmp_path: Path, mode: str) -> None:
    process = start(tmp_path, f"mode={mode}")
    output, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    assert output.splitlines()[-1] == "unwound"
    assert errors.splitlines() == [
        "TrainingError: expected a finite loss",
        "    got nan",
        "    lower the learning rate",
    ]


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "mode=bug")
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "Traceback" in errors
    assert "RuntimeError: a bug" in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_the_recipe(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = start(tmp_path, "mode=wait")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("running")

    process.send_signal(number)
    output, errors = process.communicate(timeout=120)

    assert process.returncode == status
    assert output.splitlines() == ["unwound"]
    assert "Traceback" not in errors
