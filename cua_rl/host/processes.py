"""Child processes that cannot outlive the controller: model server, trainer, database."""

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cua_rl.host import process_guard
from cua_rl.host.scratch import MARK, scratch_folder
from cua_rl.host.users import SystemUser
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 2**10

GUARD = (sys.executable, "-P", process_guard.__file__)
"""-P: a script's folder comes first on its path, and ours has a `types.py`, which Python's own modules would import."""


def free_port(wanted: int = 0, host: str = "127.0.0.1") -> int:
    """A free port: `wanted`, or any if it is 0; raises `OSError` if the wanted one is taken."""
    with socket.socket() as probe:
        # a port whose last connections are still closing counts as free: servers bind it in the same way
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there; False for names, except localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to and read, through no link of folder or file; raises `ConfigError` where there is one."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            log = os.fdopen(os.open(path.name, flags, 0o666, dir_fd=folder), "a+b")
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise
        raise ConfigError(
            f"expected a file in a folder for the log {str(path)!r}, got a link or a pipe; remove it"
        ) from None
    os.set_blocking(log.fileno(), True)
    return log


def _send_ahead(content: bytes) -> socket.socket:
    """A socket from which a process can read the content, and then the end."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)
        ours.setblocking(False)  # fail rather than wait for a reader that is not there yet
        ours.sendall(content)
    return theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where the guard looks for a command's result, see `process_guard._Result`."""

    path: Path
    taken: BinaryIO
    """Gets a line about where it was found, and then its bytes, before `wait` returns."""


class OwnedProcess:
    """A running command, an async context manager: leaving it, dying, or being killed ends the command and its
    children.

    Output goes to `log_path` (appended); it works in `folder`, by default in ours. Ctrl-C in a terminal reaches only
    the controller, which then stops what it owns in order. With `user`, the command runs as that user, who stays
    claimed until the command has ended; a command that changes the user by itself gets it as `claim`. Of the output of
    either, which may have no end, the log keeps head and tail. `told` is what the command reads from standard input,
    up to 100 kB; it comes by a socket, which, unlike a pipe or file, cannot be opened a second time.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stop_timeout_s: float = 10.0,
        user: SystemUser | None = None,
        claim: SystemUser | None = None,
        told: bytes | None = None,
        report: Report | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        if report is not None:  # a blank line tells the guard who the command is, before it runs anything of its own
            command = ["sh", "-c", 'echo >&"$CUA_RESULT_FD"; exec "$@"', "sh", *command]
        self._command = list(command) if user is None else user.command(command)
        self._locks = [kept.lock.fileno() for kept in (user, claim) if kept is not None and kept.lock is not None]
        self._guard_options = [] if user is None and claim is None else ["--bounded"]
        if report is not None:
            uid = os.geteuid() if user is None or user.uid is None else user.uid
            self._guard_options.append(f"--result={report.taken.fileno()}:{uid}:{report.path}")
            self._locks.append(report.taken.fileno())
        self._told = told
        self._environment = dict(os.environ if environment is None else environment)
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._guard: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    async def start(self) -> None:
        """Start the command; one that does not exist ends with a `FileNotFoundError` in its log."""
        await asyncio.to_thread(self.log_path.parent.mkdir, parents=True, exist_ok=True)
        scratch = str(await asyncio.to_thread(scratch_folder))
        mark = {MARK: scratch}  # found by it if even its guard is killed
        log = await asyncio.to_thread(open_log, self.log_path)
        read_end, self._lifeline = os.pipe()
        told = None if self._told is None else _send_ahead(self._told)
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *GUARD,
                str(read_end),
                str(self._stop_timeout_s),
                f"--scratch={scratch}",
                *self._guard_options,
                *self._command,
                stdin=asyncio.subprocess.DEVNULL if told is None else told.fileno(),
                stdout=log,
                stderr=log,
                env=self._environment | mark,
                cwd=self._folder,
                pass_fds=(read_end, *self._locks),  # only for the guard, which passes none on
                start_new_session=True,
            )
        finally:
            os.close(read_end)
            log.close()
            if told is not None:
                told.close()
        logger.info("started process=%s guard_pid=%s log=%s", self.name, self._guard.pid, self.log_path)

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.returncode is None

    @property
    def exit_status(self) -> int | None:
        """As `wait` returns it; None while the command runs, or before it has started."""
        status = None if self._guard is None else self._guard.returncode
        return status if status is None or status >= 0 else 128 - status  # the guard was killed, its command with it

    def command_pid(self) -> int:
        """The number of the command (Linux); raises `ProcessLookupError` if it has ended."""
        guard = 0 if self._guard is None else self._guard.pid
        try:
            return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            raise ProcessLookupError(f"process {self.name!r} is not running") from None

    async def wait(self) -> int:
        """Wait for the command to end and return its exit status (128 + n if signal n ended it)."""
        if self._guard is None:
            raise RuntimeError(f"process {self.name!r} was never started")
        await self._guard.wait()
        status = self.exit_status
        assert status is not None
        return status

    async def stop(self) -> None:
        """End the command and everything it started: SIGTERM, then SIGKILL after `stop_timeout_s`."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._guard is not None:
            await asyncio.shield(self._guard.wait())

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines of the log, for error messages; of endless lines, their ends. Somebody may have deleted it."""
        if not self.log_path.exists():
            return f"({self.log_path} was deleted)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read(_TAIL_BYTES).splitlines(keepends=True)  # of text, it would also split at U+2028
        return b"".join(lines[-num_lines:]).decode(errors="replace")

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()  # no other code sets it: the block is not entered
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def freeze_loaded_objects() -> None:
    """Exclude all objects loaded so far from garbage collection: they live as long as the process."""
    # A full collection that traverses them blocks the event loop for up to 0.3 s.
    gc.collect()
    gc.freeze()
