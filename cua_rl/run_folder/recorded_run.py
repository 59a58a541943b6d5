"""The database of a recorded run: its own, or the one that the environment names."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from cua_rl.database.models import Training
from cua_rl.database.postgres import read_own_database
from cua_rl.database.session import find_database
from cua_rl.monitor.databases import Database, open_database
from cua_rl.monitor.run_folders import has_database
from cua_rl.types.errors import ConfigError, DatabaseError, boundary


@asynccontextmanager
async def open_run_database(
    run: str, environ: Mapping[str, str], setting: str = "run"
) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and the run's name if the database may hold others; `setting` is what named the run.

    An evaluation's own database holds a run for each model: FOLDER@MODEL names it, "@MODEL" is then its name here.
    """
    folder, model = _locate(run)
    async with AsyncExitStack() as stack:
        if folder is not None:
            url = await stack.enter_async_context(read_own_database(folder))
        else:
            url = await find_database(environ)
        if url is None:
            raise ConfigError(
                f"{setting}: expected the folder of a run with its own database, or DATABASE_URL to be set, got "
                f"{run!r} without postgres/ in it; name such a folder"
            )
        database = open_database(url)
        stack.push_async_callback(database.engine.dispose)
        yield database, run if folder is None else model


def _locate(run: str) -> tuple[Path | None, str | None]:
    """The folder with the run's own database, None without one, and the model's name in it."""
    folder, _, model = run.partition("@")
    for place, name in ((run, None), (folder, f"@{model}")):
        path = Path(place).expanduser().absolute()
        if has_database(path):
            return path, name
    return None, None


async def find_training_id(database: Database, name: str | None, setting: str = "run") -> int:
    """The key of the run of this name or number, or of the only one; raises `ConfigError`."""
    query = select(Training.id, Training.run_name).order_by(Training.started_at.desc(), Training.id.desc())
    wanted = query
    if name is not None and name.startswith("@"):  # whatever the folder was called
        wanted = query.where(Training.run_name.endswith(name, autoescape=True))
    elif name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        is_named = Training.run_name.in_((name, Path(name).name))
        wanted = query.where(Training.id == int(name) if is_number else is_named)
    reading = f"reading run {name!r} (an error about tables or columns: the run's version of the schema is another)"
    with boundary(DatabaseError, reading):
        async with database.sessions() as session:
            found = (await session.execute(wanted.limit(2))).all()
            others = (await session.execute(query.limit(5))).all()
    if not found or (name is None and len(found) > 1):
        names = ", ".join(repr(other.run_name) for other in others) or "none"
        raise ConfigError(
            f"{setting}: expected the name of a recorded run, or FOLDER@MODEL of an evaluation of several models, got "
            f"{'none' if name is None else repr(name)}; the latest ones are {names}"
        )
    return found[0].id
