"""The database of a recorded run: its own, or the one that the environment names."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from cua_rl.database.migrations import migrate
from cua_rl.database.models import Training
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.session import check_connection, database_url
from cua_rl.monitor.databases import Database, open_database
from cua_rl.monitor.run_folders import has_database
from cua_rl.types.errors import ConfigError


@asynccontextmanager
async def open_run_database(run: str, environ: Mapping[str, str]) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and the run's name if the database may hold others.

    An evaluation's own database holds a run for each model: FOLDER@MODEL names it, "@MODEL" is then its name here.
    """
    folder, model = Path(run), ""
    if not has_database(folder) and has_database(Path(run.partition("@")[0])):
        folder, model = Path(run.partition("@")[0]), run[run.index("@") :]
    is_own = has_database(folder)
    url = running_postgres_url(folder / "postgres") if is_own else database_url(environ)
    async with AsyncExitStack() as stack:
        if is_own and url is None:
            server = EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log")
            url = (await stack.enter_async_context(server)).url
            await migrate(url)  # the run may have been recorded by an older version
        elif url is None:
            raise ConfigError(
                f"run: expected the folder of a run with its own database, or DATABASE_URL to be set, got {run!r}; "
                "name such a folder"
            )
        elif not is_own:
            await check_connection(url)
        database = open_database(url)
        stack.push_async_callback(database.engine.dispose)
        yield database, (model or None) if is_own else run


async def find_training(database: Database, name: str | None) -> int:
    """The key of the run of this name or number, the latest one without a name; raises `ConfigError`."""
    query = select(Training.id, Training.run_name).order_by(Training.started_at.desc())
    if name is not None and name.startswith("@"):  # whatever the folder was called
        query = query.where(Training.run_name.endswith(name, autoescape=True))
    elif name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        query = query.where(Training.id == int(name) if is_number else Training.run_name == name)
    async with database.sessions() as session:
        found = (await session.execute(query)).all()
    if not found:
        raise ConfigError(f"run: expected the name of a run in the database, got {name!r}; the monitor lists them")
    if name is None and len(found) > 1:
        models = ", ".join(sorted("@" + row.run_name.rpartition("@")[2] for row in found))
        raise ConfigError(
            f"run: expected one of the {len(found)} models of the evaluation in this folder, got the folder alone; "
            f"append {models}"
        )
    return found[0].id
