"""Child processes that cannot outlive the controller: model server, trainer, database."""

import asyncio
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cua_rl import process_guard
from cua_rl.scratch import MARK, scratch_folder
from cua_rl.system_users import SystemUser

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 2**10

GUARD = (sys.executable, "-P", process_guard.__file__)
"""-P: a script's folder comes first on its path, and ours has a `types.py`, which Python's own modules would import."""


def free_port(wanted: int = 0, host: str = "127.0.0.1") -> int:
    """A port that nobody listens on: `wanted`, or any if it is 0; raises `OSError` if the wanted one is taken."""
    with socket.socket() as probe:
        # a port whose last connections are still closing counts as free: servers bind it in the same way
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there; False for names, except localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OwnedProcess:
    """A running command, an async context manager: leaving it, dying, or being killed ends the command and its
    children.

    Output goes to `log_path` (appended); it works in `folder`, by default in ours. Ctrl-C in a terminal reaches only
    the controller, which then stops what it owns in order. With `user`, the command runs as that user, who stays
    claimed until the command has ended; a command that changes the user by itself gets it as `claim`.
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
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command) if user is None else user.command(command)
        self._locks = [kept.lock.fileno() for kept in (user, claim) if kept is not None and kept.lock is not None]
        self._environment = dict(os.environ if environment is None else environment)
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._guard: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    async def start(self) -> None:
        """Start the command; one that does not exist ends with a `FileNotFoundError` in its log."""
        await asyncio.to_thread(self.log_path.parent.mkdir, parents=True, exist_ok=True)
        mark = {MARK: str(await asyncio.to_thread(scratch_folder))}  # found by it if even its guard is killed
        log = await asyncio.to_thread(self.log_path.open, "ab")
        read_end, self._lifeline = os.pipe()
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *GUARD,
                str(read_end),
                str(self._stop_timeout_s),
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment | mark,
                cwd=self._folder,
                pass_fds=(read_end, *self._locks),  # the guard's alone: it passes none on
                start_new_session=True,
            )
        finally:
            os.close(read_end)
            log.close()
        logger.info("started process=%s guard_pid=%s log=%s", self.name, self._guard.pid, self.log_path)

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.returncode is None

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
        status = await self._guard.wait()
        return status if status >= 0 else 128 - status  # the guard itself was killed, and its command with it

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
            await self.stop()  # nobody else does: the block is not entered
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
