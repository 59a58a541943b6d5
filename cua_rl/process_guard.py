"""A guard between us and a child process: `python process_guard.py LIFELINE STOP_TIMEOUT_S COMMAND...`.

The guard runs COMMAND in a session of its own and ends it, with everything it started, as soon as LIFELINE reaches end
of file. The other end of it belongs to the controller, so this happens even if the controller is killed with SIGKILL.
The guard's exit status is the command's. Standard library only: it starts in about 20 ms.

LIFELINE is the number of an inherited pipe. Where another program starts the guard for us, it is the path of a FIFO,
and COMMAND gets that program's pipes 3 and 4.

On Linux the kernel helps: orphans become the guard's children, and the command ends even if the guard is killed. macOS
has neither, so there the guard finds orphans by their session, and must not be killed itself.
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
_PIPES = (3, 4)
_PATIENCE_S = 5.0  # of killing without a pause: a process that keeps forking is caught between two forks


def main(arguments: list[str], platform: str = sys.platform) -> int:
    """Run the guarded command until it ends or the controller's end of the pipe closes."""
    stop_timeout_s, command = float(arguments[1]), arguments[2:]
    pipes = () if arguments[0].isdecimal() else _PIPES
    # non-blocking: if the writer has already died, opening would block for ever
    lifeline = os.open(arguments[0], os.O_RDONLY | os.O_NONBLOCK) if pipes else int(arguments[0])
    os.set_blocking(lifeline, False)
    libc = ctypes.CDLL(None, use_errno=True) if platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def prepare_child() -> None:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    child = subprocess.Popen(command, preexec_fn=prepare_child, pass_fds=pipes)
    for pipe in pipes:
        os.close(pipe)  # so that their other ends see when the command has closed them
    while child.poll() is None and not _closed(lifeline):
        pass
    _end_all(child, stop_timeout_s, platform)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(child: subprocess.Popen[bytes], stop_timeout_s: float, platform: str) -> None:
    """End the command and everything that it started: SIGTERM, then SIGKILL after `stop_timeout_s`."""
    # ids of all running processes of the command, including itself
    descendants = _descendants if platform == "linux" else lambda: _session_members(child.pid)
    _signal_all(signal.SIGTERM, descendants())
    deadline = time.monotonic() + stop_timeout_s
    while descendants() and time.monotonic() < deadline:
        _reap(child)
        time.sleep(_POLL_S)
    while (left := descendants()) or _has_children(platform):
        _signal_all(signal.SIGKILL, left)
        _reap(child)
        if not left or time.monotonic() > deadline + _PATIENCE_S:
            time.sleep(_POLL_S)
    child.wait()


def _has_children(platform: str) -> bool:
    """Whether there is a child, running or not yet waited for: without one, a subreaper has no descendants.

    A walk through /proc misses a process whose parent ends meanwhile.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return platform == "linux"


def _closed(lifeline: int) -> bool:
    select.select([lifeline], [], [], _POLL_S)
    try:
        return os.read(lifeline, 1) == b""
    except BlockingIOError:
        return False


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Wait for adopted orphans; the child itself is left to Popen, which needs its status."""
    child.poll()
    for pid in _children_of(os.getpid()):
        if pid != child.pid:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _signal_all(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _session_members(session: int) -> list[int]:
    """All running processes of the session that the command leads, including orphans."""
    printed = subprocess.run(["ps", "-axo", "pid=,stat="], capture_output=True, text=True, check=True).stdout
    members: list[int] = []
    for pid, state in (line.split()[:2] for line in printed.splitlines()):
        with suppress(ProcessLookupError, PermissionError):
            if not state.startswith("Z") and os.getsid(int(pid)) == session:
                members.append(int(pid))
    return members


def _descendants() -> list[int]:
    """All running processes below the guard; as a subreaper, it adopts orphans."""
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
