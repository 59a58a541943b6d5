"""A guard between us and a child process: `python process_guard.py LIFELINE STOP_TIMEOUT_S COMMAND...`.

The guard runs COMMAND in its own session and ends it, with everything it started, as soon as LIFELINE reaches end
of file. The other end of it belongs to the controller, so this happens even if the controller is killed with SIGKILL.
The guard's exit status is the command's. Standard library only: it starts in about 20 ms.

LIFELINE is the number of an inherited pipe. Where another program starts the guard for us, it is the path of a FIFO,
and COMMAND gets that program's pipes 3 and 4.

Options may stand before COMMAND. `--scratch=FOLDER` says whose the guard is. `--bounded` keeps head and tail of the
output. `--result=TAKEN:UID:PATH` takes what the command reports, for a program whose descendants may run code of a
model under the same user: see `_Result`.

On Linux the kernel helps: orphans become the guard's children, and the command ends even if the guard is killed. macOS
has neither, so there the guard finds orphans by their session, and must not be killed itself.
"""

import ctypes
import errno
import fcntl
import itertools
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_PIPES = (3, 4)
MAX_RESULT_BYTES = 2**20
HEAD_BYTES, TAIL_BYTES = 4 * 2**20, 2**20
"""What `--bounded` keeps of an output; the file has at most twice the tail."""
_CUT = b"\n[the middle of this output is left out]\n"
_PATIENCE_S = 5.0  # of killing without a pause: a process that keeps forking is caught between two forks


def main(arguments: list[str], platform: str = sys.platform) -> int:
    """Run the guarded command until it ends or the controller's end of the pipe closes."""
    stop_timeout_s = float(arguments[1])
    words = list(itertools.takewhile(lambda word: word.startswith("--"), arguments[2:]))
    options = {name: value for name, _, value in (word.partition("=") for word in words)}
    command = arguments[2 + len(words) :]
    pipes = () if arguments[0].isdecimal() else _PIPES
    # non-blocking: if the writer has already died, opening would block forever
    lifeline = os.open(arguments[0], os.O_RDONLY | os.O_NONBLOCK) if pipes else int(arguments[0])
    os.set_blocking(lifeline, False)
    libc = ctypes.CDLL(None, use_errno=True) if platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its environment is the command's, which may refuse inspection itself
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def prepare_child() -> None:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    result = _Result(options["--result"]) if "--result" in options else None
    copying, output = _begin_copying() if "--bounded" in options else (None, None)
    child = subprocess.Popen(
        command,
        preexec_fn=prepare_child,
        pass_fds=pipes if result is None else (*pipes, result.theirs.fileno()),
        env=None if result is None else {**os.environ, "CUA_RESULT_FD": str(result.theirs.fileno())},
        stdout=output,
        stderr=output,
    )
    for pipe in (*pipes, *(() if output is None else (output,))):
        os.close(pipe)  # so that their other ends see when the command has closed them
    _watch(child, lifeline, stop_timeout_s, platform, result)
    if copying is not None:
        copying.join(_PATIENCE_S)  # everything that could still write has ended
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _watch(
    child: "subprocess.Popen[bytes]", lifeline: int, stop_timeout_s: float, platform: str, result: "_Result | None"
) -> None:
    """Wait until the command has ended or the lifeline is closed, and end what is left."""
    if result is not None:
        result.begin(child)
    look = (lambda: False) if result is None else result.look
    while look() or child.poll() is None:
        if _closed(lifeline, [] if result is None else result.watched):
            break
    _end_all(child, stop_timeout_s, platform, look)


class _Result:
    """What a program reports, taken so that its descendants cannot replace it.

    They have the program's user, and can write wherever it can. But the kernel names the process that wrote to a
    socket, so what CUA_RESULT_FD brings counts only from the command itself (on Linux), which writes a blank line
    before it runs anything of its own; the last line is the result.
    If it wrote nothing there, the file at the path counts as it stands when the command ends, before its descendants
    are ended. The file TAKEN gets a line that says where the result was found, or why not, and then the bytes.
    """

    def __init__(self, told: str) -> None:
        taken, uid, self._path = told.split(":", 2)
        self._taken, self._uid = int(taken), int(uid)
        self._ours, theirs = socket.socketpair()
        # above 3, which the command that changes the user may need
        self.theirs = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 4))
        theirs.close()
        self._ours.setblocking(False)
        self._names_sender = sys.platform == "linux"
        if self._names_sender:
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._line, self._is_new, self._is_taken, self._stranger, self._sender = bytearray(), True, False, 0, 0
        self._end: int | None = None

    def begin(self, child: "subprocess.Popen[bytes]") -> None:
        """Watch the command, which has its end of the socket."""
        self._child = child
        self.theirs.close()
        self.watched = [self._ours.fileno()]

    def look(self) -> bool:
        """Read what has come; take the result once the command has ended. False, for loops."""
        if self._is_taken:
            return False
        # the child may be a sandbox, which ends after the command; until it is waited for, its number is not reused
        ended = self._child.returncode is not None or bool(
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        )
        ended = ended or bool(self._end is not None and select.select([self._end], [], [], 0)[0])
        self._receive()
        if ended:
            self._is_taken, self.watched = True, []
            found, content = ("written", bytes(self._line)) if self._line else self._read_file()
            if found == "absent" and self._stranger:
                found = f"written to CUA_RESULT_FD by process {self._stranger}, which is not the program itself"
            with os.fdopen(self._taken, "wb") as file:
                file.write(found.encode() + b"\n" + content)
        return False

    def _receive(self) -> None:
        num_bytes = 0
        while num_bytes <= 2 * MAX_RESULT_BYTES:  # more cannot have waited; others may send without end
            try:
                piece, told, *_ = self._ours.recvmsg(2**16, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            except OSError:  # closed by all
                piece, told = b"", []
            if not piece:
                with suppress(ValueError):
                    self.watched.remove(self._ours.fileno())
                return
            num_bytes += len(piece)
            pid = struct.unpack("3i", told[0][2])[0] if told else 0
            if not self._sender:
                self._sender, piece = pid, piece.removeprefix(b"\n")
                with suppress(AttributeError, OSError):  # wakes us at once when it ends (Linux 5.3)
                    self._end = os.pidfd_open(pid)
                    self.watched.append(self._end)
            if self._names_sender and pid != self._sender:
                self._stranger = pid
                continue
            for part in piece.splitlines(keepends=True):
                if self._is_new and part.strip():
                    self._line.clear()
                    self._is_new = False
                self._line += part[: MAX_RESULT_BYTES + 1 - len(self._line)]
                self._is_new = self._is_new or part.endswith((b"\n", b"\r"))

    def _read_file(self) -> tuple[str, bytes]:
        try:
            # a pipe would block, and a terminal would become ours
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            return "absent", b""
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            return "a link, which is not followed" if is_link else f"not readable ({error.strerror})", b""
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == self._uid and status.st_nlink == 1:
            with os.fdopen(descriptor, "rb") as file:
                return "written", file.read(MAX_RESULT_BYTES + 1)
        os.close(descriptor)
        if stat.S_ISREG(status.st_mode):
            return "a file of another owner, or one with several names", b""
        return "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or device", b""


def _begin_copying() -> tuple[threading.Thread, int]:
    """The thread that copies a command's output to ours, and what the command writes to."""
    source, output = os.pipe()
    copying = threading.Thread(target=_copy_bounded, args=(source, 1), daemon=True)
    copying.start()
    return copying, output


def _copy_bounded(source: int, log: int) -> None:
    """Copy an output to its log, which keeps the head and the tail; to the end also if the disk is full."""
    while piece := os.read(source, 2**16):
        with suppress(OSError):
            os.write(log, piece)
            size = os.fstat(log).st_size
            if size > HEAD_BYTES + 2 * TAIL_BYTES:
                tail = os.pread(log, TAIL_BYTES, size - TAIL_BYTES)
                os.ftruncate(log, HEAD_BYTES)
                os.write(log, _CUT + tail)


def _end_all(
    child: "subprocess.Popen[bytes]", stop_timeout_s: float, platform: str, look: Callable[[], object]
) -> None:
    """End the command and everything that it started: SIGTERM, then SIGKILL after `stop_timeout_s`."""
    # ids of all running processes of the command, including itself
    descendants = _descendants if platform == "linux" else lambda: _session_members(child.pid)
    # the end of a sandbox kills all that is in it
    _signal_all(signal.SIGTERM, [pid for pid in descendants() if platform != "linux" or _name_of(pid) != "bwrap"])
    deadline = time.monotonic() + stop_timeout_s
    while descendants() and time.monotonic() < deadline:
        look()
        _reap(child)
        time.sleep(_POLL_S)
    while (left := descendants()) or _has_children(platform):
        _signal_all(signal.SIGKILL, left)
        look()
        _reap(child)
        if not left or time.monotonic() > deadline + _PATIENCE_S:
            time.sleep(_POLL_S)
    child.wait()
    look()


def _has_children(platform: str) -> bool:
    """Whether there is a child, running or not yet waited for: without one, a subreaper has no descendants.

    A walk through /proc misses a process whose parent ends meanwhile.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return platform == "linux"


def _closed(lifeline: int, watched: list[int]) -> bool:
    select.select([lifeline, *watched], [], [], _POLL_S)
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


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
