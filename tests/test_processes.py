import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cua_rl.processes import OwnedProcess

SPAWNER = (
    "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


async def read_pid(log_path: Path) -> int:
    while not (text := log_path.read_text()).endswith("\n"):
        await asyncio.sleep(0.02)
    return int(text)


async def test_stopping_ends_the_command_and_its_grandchildren(tmp_path: Path) -> None:
    async with OwnedProcess([sys.executable, "-c", SPAWNER], name="spawner", log_path=tmp_path / "log") as process:
        grandchild = await read_pid(tmp_path / "log")

        assert process.is_running
        assert is_alive(grandchild)

    assert not process.is_running
    assert not is_alive(grandchild)


async def test_exit_status_and_log_tail_are_the_commands(tmp_path: Path) -> None:
    process = OwnedProcess(["sh", "-c", "echo broken; exit 7"], name="failing", log_path=tmp_path / "log")

    async with process:
        status = await process.wait()

    assert status == 7
    assert process.log_tail() == "broken\n"


def test_killing_the_controller_ends_everything_it_owned(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    controller = f"""
import asyncio, pathlib
from cua_rl.processes import OwnedProcess
async def main():
    async with OwnedProcess(["{sys.executable}", "-c", {SPAWNER!r}], name="x", log_path=pathlib.Path("{log_path}")):
        await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", controller])
    while not log_path.exists() or not log_path.read_text().endswith("\n"):
        time.sleep(0.05)
    grandchild = int(log_path.read_text())

    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert wait_until_dead(grandchild)


async def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = OwnedProcess([sys.executable, "-c", code], name="stubborn", log_path=tmp_path / "log", stop_timeout_s=0.3)

    async with process:
        await read_pid(tmp_path / "log")

    assert not process.is_running
