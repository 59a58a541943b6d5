"""A guard between us and a child process: `python process_guard.py FD STOP_TIMEOUT_S COMMAND...`.

The guard runs COMMAND in a session of its own and ends it, with everything it started, as soon as FD reaches end of
file. The other end of FD belongs to the controller, so this happens even if the controller is killed with SIGKILL. The
guard's exit status is the command's. Standard library only: it starts in about 20 ms.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """Run the guarded command until it ends or the controller's end of the pipe closes."""
    lifeline, stop_timeout_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(
        command,
        preexec_fn=lambda: _prepare_child(libc),
    )
    while child.poll() is None and not _closed(lifeline):
        pass
    _stop(child, stop_timeout_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prepare_child(libc: ctypes.CDLL) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _closed(lifeline: int) -> bool:
    readable, _, _ = select.select([lifeline], [], [], _POLL_S)
    return bool(readable) and os.read(lifeline, 1) == b""


def _stop(child: subprocess.Popen[bytes], stop_timeout_s: float) -> None:
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + stop_timeout_s
    while _descendants() and time.monotonic() < deadline:
        _reap(child)
        time.sleep(_POLL_S)
    while _descendants():
        _signal_all(signal.SIGKILL)
        _reap(child)
        time.sleep(_POLL_S)
    child.wait()


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect orphans that the kernel gave to us; the child itself is collected by Popen, which wants its status."""
    child.poll()
    for pid in _children_of(os.getpid()):
        if pid != child.pid:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _signal_all(number: int) -> None:
    for pid in _descendants():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> list[int]:
    """All living processes below the guard; a subreaper sees even those whose parents are gone."""
    found: list[int] = []
    front = [os.getpid()]
    while front:
        front = [child for parent in front for child in _children_of(parent)]
        found += [pid for pid in front if not _is_zombie(pid)]
    return found


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/task/{task}/children") as file:
                children += [int(word) for word in file.read().split()]
    return children


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
