"""The database of a run that was recorded: its own, or one that the environment names."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from cua_rl.database.migrations import migrate
from cua_rl.database.models import Training
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.session import check_connection, database_url
from cua_rl.errors import ConfigError
from cua_rl.monitor.databases import Database, open_database
from cua_rl.monitor.run_folders import has_database


@asynccontextmanager
async def open_run_database(run: str, environ: Mapping[str, str]) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and its name if the database may hold others."""
    folder = Path(run)
    if has_database(folder):
        url = running_postgres_url(folder / "postgres")
        if url is not None:
            async with _opened(url) as database:
                yield database, None
            return
        async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as postgres:
            await migrate(postgres.url)
            async with _opened(postgres.url) as database:
                yield database, None
        return
    url = database_url(environ)
    if url is None:
        raise ConfigError(
            f"run: expected the folder of a run with its own database, or DATABASE_URL to be set, got {run!r}; "
            "name such a folder"
        )
    await check_connection(url)
    async with _opened(url) as database:
        yield database, run


@asynccontextmanager
async def _opened(url: str) -> AsyncGenerator[Database]:
    database = open_database(url)
    try:
        yield database
    finally:
        await database.engine.dispose()


async def find_training(database: Database, name: str | None) -> int:
    """The key of the run of this name or number, the latest one without a name; raises `ConfigError`."""
    query = select(Training.id).order_by(Training.started_at.desc()).limit(1)
    if name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        query = query.where(Training.id == int(name) if is_number else Training.run_name == name)
    async with database.sessions() as session:
        found = await session.scalar(query)
    if found is None:
        raise ConfigError(f"run: expected the name of a run in the database, got {name!r}; the monitor lists them")
    return found
