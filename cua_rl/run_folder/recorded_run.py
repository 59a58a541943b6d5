"""The database of a recorded run: its own, or the one that the environment names."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from cua_rl.database.migrations import migrate
from cua_rl.database.models import Training
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.queries import latest_trainings
from cua_rl.database.session import check_connection, database_url
from cua_rl.monitor.databases import Database, open_database
from cua_rl.monitor.run_folders import has_database
from cua_rl.types.errors import ConfigError, DatabaseError, boundary


@asynccontextmanager
async def open_run_database(
    run: str, environ: Mapping[str, str], *, setting: str = "run"
) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and the run's name if the database may hold others; raises `ConfigError` about `setting`."""
    folder, is_own = _locate(run)
    url = running_postgres_url(folder / "postgres") if is_own else database_url(environ)
    async with AsyncExitStack() as stack:
        if is_own and url is None:
            server = EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log")
            url = (await stack.enter_async_context(server)).url
            await migrate(url)  # the run may have been recorded by an older version
        elif url is None:
            raise ConfigError(
                f"{setting}: expected the folder of a run with its own database, or DATABASE_URL to be set, got "
                f"{run!r}; name such a folder"
            )
        elif not is_own:
            try:
                await check_connection(url)
            except DatabaseError as error:
                raise ConfigError(str(error)) from None
        database = open_database(url)
        stack.push_async_callback(database.engine.dispose)
        yield database, None if is_own else folder.name


def _locate(run: str) -> tuple[Path, bool]:
    """The folder that `run` names, and whether it holds the run's own database."""
    folder = Path(run).expanduser()
    return folder, has_database(folder)


async def find_training(database: Database, name: str | None, *, setting: str = "run") -> int:
    """The key of the run of this name or number, the latest one without a name; raises `ConfigError`."""
    query = select(Training.id).order_by(Training.started_at.desc()).limit(1)
    if name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        query = query.where(Training.id == int(name) if is_number else Training.run_name == name)
    reading = f"reading run {name!r} (an error about tables or columns: the run's version of the schema is another)"
    with boundary(DatabaseError, reading):
        async with database.sessions() as session:
            found = await session.scalar(query)
            latest = [] if found is not None else await latest_trainings(session, limit=5)
    if found is None:
        names = ", ".join(repr(one.run_name) for one in latest) or "none"
        raise ConfigError(
            f"{setting}: expected the name of a recorded run, got {name!r}; choose one, of which the latest are {names}"
        )
    return found
