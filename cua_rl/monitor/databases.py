"""The databases that the monitor shows, and the lookup of runs in them."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Select, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from cua_rl.database.models import Training
from cua_rl.database.session import make_engine, make_writer_engine
from cua_rl.types.errors import CuaError

AnySelect = Select[*tuple[Any, ...]]
"""A query with any columns."""

_OPEN_S = 30.0
_RUN_ID = re.compile(r"(?:([A-Za-z0-9_-][A-Za-z0-9_.-]{0,99})\.)?([0-9]{1,18})")


class NotFoundError(CuaError):
    """The requested object does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """One database; `key` is empty for the main one, for others part of their run ids.

    `folder` is where the run of an embedded one lies now, wherever it was when it was recorded.
    """

    key: str
    url: str
    engine: AsyncEngine
    sessions: async_sessionmaker[AsyncSession]
    folder: Path | None = None

    def run_id(self, training_id: int) -> str:
        """The `run_id` of a run of this database."""
        return f"{self.key}.{training_id}" if self.key else str(training_id)


@dataclass(eq=False, slots=True, kw_only=True)
class RunFolder:
    """A folder whose database is opened when somebody opens its run."""

    key: str
    path: Path
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    used_at: float = 0.0
    """When it was last asked for, by the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """A run that exists, and an open session to its database."""

    run_id: str
    training: Training
    session: AsyncSession
    database: Database


def open_database(url: str, key: str = "", *, pool_size: int = 8, folder: Path | None = None) -> Database:
    """Connect lazily; dispose of `engine` when done."""
    engine = make_engine(url, pool_size=pool_size)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    return Database(key=key, url=url, engine=engine, sessions=sessions, folder=folder)


class Databases:
    """All databases that are shown, the main one first; an async context manager that closes them."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = {database.key: database for database in databases}
        self.folders: dict[str, RunFolder] = {}
        """Of runs that are shown, by their keys; the owner of each opens its database when it is wanted."""
        self._writer: Engine | None = None

    @property
    def closed(self) -> list[RunFolder]:
        """Folders of runs whose databases are not open."""
        return [folder for key, folder in self.folders.items() if key not in self._databases]

    @property
    def all(self) -> tuple[Database, ...]:
        return tuple(self._databases.values())

    @property
    def main(self) -> Database:
        """The database that ingest writes to; raises `NotFoundError` if only run folders are shown."""
        if "" not in self._databases:
            raise NotFoundError(
                "expected a monitor with a database that accepts runs, got one that shows folders; start it with a "
                "database URL"
            )
        return self._databases[""]

    def add(self, database: Database) -> None:
        """Add a database, replacing one with the same key."""
        self._databases[database.key] = database
        if database.key in self.folders:
            self.folders[database.key].opened.set()

    async def remove(self, database: Database) -> None:
        if self._databases.get(database.key) is database:
            del self._databases[database.key]
            if database.key in self.folders:
                self.folders[database.key].opened.clear()
        if self._writer is not None and database.key == "":
            await asyncio.to_thread(self._writer.dispose)
            self._writer = None
        await database.engine.dispose()

    @property
    def writer_engine(self) -> Engine:
        """An engine with one connection for ingest, so that batches are stored one after the other."""
        if self._writer is None:
            self._writer = make_writer_engine(self.main.url)
        return self._writer

    def find(self, run_id: str) -> tuple[Database, int]:
        """The database and `trainings.id` of a `run_id`; raises `NotFoundError`."""
        parsed = _RUN_ID.fullmatch(run_id)
        database = None if parsed is None else self._databases.get(parsed.group(1) or "")
        if parsed is None or database is None:
            raise NotFoundError(f"expected the run_id of a run, got {run_id[:120]!r}; /api/runs lists them")
        return database, int(parsed.group(2))

    @asynccontextmanager
    async def open_run(self, run_id: str) -> AsyncGenerator[RunAccess]:
        """A session with the run's row; raises `NotFoundError` if there is no such run."""
        await self._open_folder(run_id)
        database, training_id = self.find(run_id)
        async with database.sessions() as session:
            query = select(Training).order_by(Training.started_at.desc()).limit(1)
            training = await session.scalar(query.where(Training.id == training_id) if training_id else query)
            if training is None:
                raise NotFoundError(f"expected the run_id of a run, got {run_id!r}; /api/runs lists them")
            shown_id = database.run_id(training.id)
            yield RunAccess(run_id=shown_id, training=training, session=session, database=database)

    async def _open_folder(self, run_id: str) -> None:
        """Wait until the database of the run's folder is open, if it is one of the folders."""
        folder = self.folders.get(run_id.rpartition(".")[0])
        if folder is None:
            return
        folder.used_at = time.monotonic()
        folder.wanted.set()
        try:
            async with asyncio.timeout(_OPEN_S):
                await folder.opened.wait()
        except TimeoutError:
            raise NotFoundError(
                f"expected the database of {folder.path} to start within {_OPEN_S:.0f} s, it did not; see "
                f"{folder.path / 'logs' / 'postgres.log'}"
            ) from None

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.to_thread(self._writer.dispose)
        for database in self.all:
            await database.engine.dispose()
