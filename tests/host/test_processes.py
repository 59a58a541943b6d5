import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cua_rl.host import process_guard
from cua_rl.host.processes import GUARD, OwnedProcess
from cua_rl.host.scratch import MARK, make_scratch_folder, remove_abandoned, scratch_folder
from cua_rl.host.users import GUEST_UIDS, can_change_user, claim_user
from scripts.red_team.users import STRANGER_UID, allow_inspection, as_user, inspect
from tests.live_processes import is_alive, wait_until_dead
from tests.patience import patience

SPAWNER = (
    "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
)


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


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: no process refuses inspection")
def test_a_guard_shows_nobody_of_its_user_the_environment_of_its_command() -> None:
    said = as_user(STRANGER_UID, inspect_own_guard)

    assert said.startswith("refused"), said


def inspect_own_guard() -> str:
    (started, output), (lifeline, _) = os.pipe(), os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            allow_inspection()  # as after exec
            os.dup2(output, 1)
            process_guard.main([str(lifeline), "1", "sh", "-c", "echo started; exec cat"])
        finally:
            os._exit(1)
    try:
        assert os.read(started, 8) == b"started\n"
        return inspect(guard)
    finally:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


async def test_exit_status_and_log_tail_are_the_commands(tmp_path: Path) -> None:
    process = OwnedProcess(["sh", "-c", "echo broken; exit 7"], name="failing", log_path=tmp_path / "log")

    async with process:
        status = await process.wait()

    assert status == 7
    assert process.log_tail() == "broken\n"


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: a command outlives its guard")
async def test_a_log_that_somebody_has_deleted_hides_no_exit_status(tmp_path: Path) -> None:
    async with OwnedProcess(["sh", "-c", "exit 3"], name="failing", log_path=tmp_path / "log") as process:
        status = await process.wait()
        process.log_path.unlink()
        assert (status, process.log_tail()) == (3, f"({tmp_path / 'log'} was deleted)")


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: no list of descriptors")
async def test_a_start_that_fails_or_is_cancelled_leaves_no_descriptor(tmp_path: Path) -> None:
    scratch_folder()  # its lock stays open
    before = set(os.listdir("/proc/self/fd"))
    for log_path in (tmp_path, tmp_path / "log"):  # a folder is no log
        starting = asyncio.create_task(OwnedProcess(["true"], name="brief", log_path=log_path).__aenter__())
        while not starting.done() and len(os.listdir("/proc/self/fd")) < len(before) + 2:
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
    async with asyncio.timeout(patience(30)):  # threads of the cancelled start close theirs in their own time
        while set(os.listdir("/proc/self/fd")) != before:
            gc.collect()
            await asyncio.sleep(0.01)


async def test_a_killed_guard_reads_as_a_signal_and_leaves_no_command(tmp_path: Path) -> None:
    async with OwnedProcess(["sh", "-c", "echo $$; exec sleep 60"], name="x", log_path=tmp_path / "log") as process:
        command = await read_pid(tmp_path / "log")
        os.kill(psutil.Process(command).ppid(), signal.SIGKILL)

        assert await process.wait() == 128 + signal.SIGKILL
    assert wait_until_dead(command)


async def test_a_separator_inside_a_line_is_no_end_of_it(tmp_path: Path) -> None:
    async with OwnedProcess(["printf", "first\\na\u2028b\\n"], name="speaker", log_path=tmp_path / "log") as process:
        await process.wait()

    assert process.log_tail(1) == "a\u2028b\n"


async def test_the_tail_of_an_endless_line_takes_no_memory(tmp_path: Path) -> None:
    async with OwnedProcess(["true"], name="speaker", log_path=tmp_path / "log") as process:
        await process.wait()
    (tmp_path / "log").write_text("first\n")
    os.truncate(tmp_path / "log", 8 * 2**30)
    with (tmp_path / "log").open("ab") as log:
        log.write(b"\nsecond\nlast\n")

    assert process.log_tail(2) == "second\nlast\n"
    assert len(process.log_tail(3)) < 2**17


def test_killing_the_controller_ends_everything_it_owned(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    controller = f"""
import asyncio, pathlib
from cua_rl.host.processes import OwnedProcess
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


HOPPERS = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.002)
print(os.getsid(0), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: no kernel that gives orphans to the guard")
async def test_processes_that_change_their_session_and_fork_all_the_time_are_ended_too(tmp_path: Path) -> None:
    mark = f"hoppers-{os.getpid()}-{tmp_path.name}"
    async with OwnedProcess(
        [sys.executable, "-c", HOPPERS, mark], name="hoppers", log_path=tmp_path / "log", stop_timeout_s=0.3
    ):
        await read_pid(tmp_path / "log")

    assert [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])] == []


def test_what_outlives_controller_and_guard_is_ended_by_the_next_start(tmp_path: Path) -> None:
    log_path, environ = tmp_path / "log", {**os.environ, "TMPDIR": str(tmp_path)}
    spawner = SPAWNER.replace("['sleep', '60']", "['setsid', 'sleep', '60']")
    controller = f"""
import asyncio, pathlib
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.scratch import MARK, make_scratch_folder
async def main():
    make_scratch_folder("pg")
    async with OwnedProcess(["{sys.executable}", "-c", {spawner!r}], name="x", log_path=pathlib.Path("{log_path}")):
        await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", controller], env=environ)
    while not log_path.exists() or not log_path.read_text().endswith("\n"):
        time.sleep(0.05)
    grandchild = int(log_path.read_text())
    (guard,) = (child.pid for child in psutil.Process(process.pid).children())
    folders = list(tmp_path.glob("cua_rl-*"))
    assert len(folders) == 1
    os.kill(guard, signal.SIGSTOP)  # or it would be at work between the two
    for pid in (process.pid, guard):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert is_alive(grandchild)

    later = "from cua_rl.host.scratch import scratch_folder; print(scratch_folder())"
    subprocess.run([sys.executable, "-c", later], env=environ, check=True, capture_output=True)

    assert wait_until_dead(grandchild)
    assert list(tmp_path.glob("cua_rl-*")) == []


def test_threads_that_ask_for_the_folder_at_once_get_the_same_one(tmp_path: Path) -> None:
    """A second one would be unlocked, and the next process would remove it with the sockets in it."""
    for number in range(1000):  # those of others, which the first thread looks at for a while
        (tmp_path / f"cua_rl-{number}").mkdir()
    ask = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from cua_rl.host.scratch import scratch_folder
together = Barrier(8)
with ThreadPoolExecutor(8) as threads:
    folders = list(threads.map(lambda _: (together.wait(), scratch_folder())[1], range(8)))
print(len(set(folders)))
"""
    command = [sys.executable, "-c", ask]

    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)

    assert done.stdout == "1\n", done.stderr


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    folder = scratch_folder()

    removed = remove_abandoned(folder.parent)

    assert folder not in removed
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o066 == 0
    inner = make_scratch_folder("x")
    assert inner.stat().st_mode & 0o777 == 0o700
    inner.rmdir()


def test_the_folder_of_a_dead_process_stays_while_a_guard_ends_what_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "cua_rl-left"
    folder.mkdir()
    (folder / ".lock").touch()
    lifeline, held = os.pipe()
    command = [*GUARD, str(lifeline), "5", f"--scratch={folder}", "sh", "-c", "echo started; exec sleep 60"]
    environ = os.environ | {MARK: str(folder)}
    with subprocess.Popen(command, env=environ, pass_fds=[lifeline], stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"started\n"

        removed = remove_abandoned(tmp_path)

        os.close(held)
        assert guard.wait() == 128 + signal.SIGTERM
    assert removed == []


def test_a_guard_of_another_process_whose_command_names_the_folder_does_not_keep_it(tmp_path: Path) -> None:
    folder = tmp_path / "cua_rl-left"
    folder.mkdir()
    (folder / ".lock").touch()
    lifeline, held = os.pipe()
    # as a sandbox does whose project holds the folder
    command = [
        *GUARD,
        str(lifeline),
        "5",
        "--scratch=/tmp/another",
        "sh",
        "-c",
        "echo; sleep 60",
        f"--scratch={folder}",
    ]
    with subprocess.Popen(command, pass_fds=[lifeline], stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        guard.stdout.readline()

        removed = remove_abandoned(tmp_path)

        os.close(held)
    assert removed == [folder]


async def test_a_guard_names_the_folder_of_its_owner(tmp_path: Path) -> None:
    async with OwnedProcess(["sh", "-c", "echo $$; exec sleep 60"], name="owned", log_path=tmp_path / "log"):
        guard = psutil.Process(await read_pid(tmp_path / "log")).parent()

        assert guard is not None
        assert f"--scratch={scratch_folder()}" in guard.cmdline()


def test_the_lock_of_a_folder_is_closed_to_others(tmp_path: Path) -> None:
    program = "import os; os.umask(0); from cua_rl.host.scratch import scratch_folder as made; print(made()); input()"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
        process.kill()


@pytest.mark.skipif(not can_change_user(), reason="not root: only root starts programs of other users")
def test_a_program_of_another_user_cannot_pass_for_a_guard_to_keep_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cua_rl-left"
    folder.mkdir()
    (folder / ".lock").touch()
    with claim_user(GUEST_UIDS) as user:
        false_guard = user.command(["sh", "-c", "sleep 60; true", "/process_guard.py"])
        with subprocess.Popen(false_guard, env={**os.environ, "CUA_RL_SCRATCH": str(folder)}, cwd="/") as process:
            while b"process_guard.py" not in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"setpriv")[0]:
                time.sleep(0.01)
            assert remove_abandoned(tmp_path) == [folder]
            process.wait()


def test_the_guard_starts_where_python_has_imported_nothing_yet() -> None:
    """Python 3.12 begins with fewer of its own modules loaded than 3.11; -S makes 3.11 begin like that."""
    read_end, write_end = os.pipe()
    interpreter, *options = GUARD
    command = [interpreter, "-S", *options, str(read_end), "5", "sh", "-c", "exit 7"]
    done = subprocess.run(command, pass_fds=(read_end,), capture_output=True, text=True, check=False)
    os.close(read_end)
    os.close(write_end)

    assert (done.returncode, done.stderr) == (7, "")


async def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = OwnedProcess([sys.executable, "-c", code], name="stubborn", log_path=tmp_path / "log", stop_timeout_s=0.3)

    async with process:
        await read_pid(tmp_path / "log")

    assert not process.is_running


async def test_a_guard_started_by_another_program_hands_its_pipes_on_and_ends_with_the_controllers_fifo(
    tmp_path: Path,
) -> None:
    """As Playwright starts it: pipe 3 to read, pipe 4 to write."""
    lifeline = tmp_path / "lifeline"
    os.mkfifo(lifeline)
    reader = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(lifeline, os.O_WRONLY)
    os.close(reader)
    command = " ".join([*GUARD, str(lifeline), "1", "sh", "-c", "'cat <&3 >&4; sleep 60'"])
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f"exec {command} 3<&0 4>&1", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"question\n")
    assert await process.stdout.readline() == b"question\n"

    os.close(writer)

    assert await process.wait() == 128 + signal.SIGTERM


async def test_a_guard_whose_controller_has_died_before_it_came_ends(tmp_path: Path) -> None:
    lifeline = tmp_path / "lifeline"
    os.mkfifo(lifeline)
    command = [*GUARD, str(lifeline), "1", "sleep", "60"]
    process = await asyncio.create_subprocess_exec("sh", "-c", 'exec "$@" 3<&0 4>&1', "sh", *command)

    assert await process.wait() == 128 + signal.SIGTERM


GUARD_ON_MACOS = (
    "import sys; from cua_rl.host.process_guard import main; sys.exit(main(sys.argv[1:], platform='darwin'))"
)
ORPHANING = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"


def run_guard_on_macos(program: str, *, close_lifeline_after_output: bool) -> tuple[int, int]:
    """The guard without the help of Linux' kernel; the process that `program` started, and the guard's status."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", GUARD_ON_MACOS, str(read_end), "5", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(read_end,)) as guard:
        os.close(read_end)
        assert guard.stdout is not None
        grandchild = int(guard.stdout.readline())
        if close_lifeline_after_output:
            os.close(write_end)
        status = guard.wait()
    if not close_lifeline_after_output:
        os.close(write_end)
    return grandchild, status


def test_on_macos_the_end_of_the_controller_ends_the_command_and_its_children() -> None:
    grandchild, status = run_guard_on_macos(SPAWNER, close_lifeline_after_output=True)

    assert status == 128 + signal.SIGTERM
    assert wait_until_dead(grandchild)


def test_on_macos_orphans_of_a_command_that_ended_are_ended_too() -> None:
    grandchild, status = run_guard_on_macos(ORPHANING, close_lifeline_after_output=False)

    assert status == 0
    assert wait_until_dead(grandchild)
