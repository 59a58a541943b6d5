"""Running processes, as tests look for those that should have ended."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from cua_rl.host.users import SystemUser
from tests.patience import IdleClock

_STRANGER_UID = 61_200
"""Above those that programs of a run get."""


def is_alive(pid: int) -> bool:
    """Whether the process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(*pids: int, timeout_s: float = 60.0) -> bool:
    """Wait until none of the processes is running; False if one still is at the time limit."""
    clock = IdleClock()
    while any(map(is_alive, pids)) and clock.look() < timeout_s:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def command_line(process: psutil.Process) -> list[str]:
    """The words that started a process; none once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def kill(processes: list[psutil.Process]) -> None:
    """End processes at once; a guard that dies takes its program with it, so some may be gone before their turn."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def site_servers(folder: Path) -> list[psutil.Process]:
    """Processes of `server.py` with this working directory."""
    return [
        process
        for process in psutil.process_iter(["cwd", "cmdline"])
        if process.info["cwd"] == str(folder) and "server.py" in (process.info["cmdline"] or [])
    ]


def stranger_connects(port: int) -> bool:
    """Whether a user who has nothing to do with us reaches this loopback port; if we are not root, whether we do."""
    stranger = SystemUser(uid=_STRANGER_UID if os.geteuid() == 0 else None)
    command = stranger.command(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"])
    return subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0


def processes_with(word: str) -> list[int]:
    """Numbers of the processes whose environment holds the word; those that a sandbox's own processes print differ."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found
