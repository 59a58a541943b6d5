"""Runs with a database of their own: the folder of each holds an embedded Postgres, which has to run to be read.

While a run goes on, its own server is used. Otherwise we start one, and stop it as soon as the run goes on: training
never finds its database taken.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.errors import DatabaseError
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.live import LiveFeed, listening
from cua_rl.monitor.schemas import LiveEvent
from cua_rl.system import is_locked

logger = logging.getLogger(__name__)

RUN_LOCK = ".cua_rl.lock"
_POLL_S = 0.5
_SCAN_S = 2.0
_MAX_FOLDERS = 8


def has_database(folder: Path) -> bool:
    """Whether the folder is one of a run with a database of its own."""
    return (folder / "postgres" / "PG_VERSION").is_file()


def is_in_use(folder: Path) -> bool:
    """Whether a run holds the folder's lock, which we never hold ourselves."""
    return is_locked(folder / RUN_LOCK)


async def show_folder(databases: Databases, feed: LiveFeed, folder: Path, key: str) -> None:
    """Keep the folder's database among those that are shown, for as long as the task runs."""
    data = folder / "postgres"
    while True:
        is_theirs = running_postgres_url(data) is not None
        if not is_theirs and is_in_use(folder):
            await asyncio.sleep(_POLL_S)  # its server is about to start, or about to stop
            continue
        try:
            async with _shown(databases, feed, folder, key):
                await _wait_for_change(folder, is_theirs=is_theirs)
        except DatabaseError as error:
            logger.warning("cannot show %s: %s", folder, str(error).split("\n", 1)[0])
            await asyncio.sleep(10 * _POLL_S)
        else:
            logger.info("the run in %s %s", folder, "has ended" if is_theirs else "goes on")


async def _wait_for_change(folder: Path, *, is_theirs: bool) -> None:
    """Until the run's own server has stopped, or, while we have one, until the run goes on."""
    while (running_postgres_url(folder / "postgres") is not None) if is_theirs else not is_in_use(folder):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _shown(databases: Databases, feed: LiveFeed, folder: Path, key: str) -> AsyncGenerator[None]:
    async with AsyncExitStack() as stack:
        url = running_postgres_url(folder / "postgres")
        if url is None:
            server = EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log")
            url = (await stack.enter_async_context(server)).url
        await migrate(url)
        database = open_database(url, key, pool_size=4)
        stack.push_async_callback(databases.remove, database)
        databases.add(database)
        await stack.enter_async_context(listening(feed, url, database.run_id))
        feed.publish(LiveEvent(event_id="", kind="reset"))
        yield


async def show_runs_below(databases: Databases, feed: LiveFeed, root: Path) -> None:
    """Show the newest runs with databases of their own below a folder, and those that begin later."""
    shown: set[Path] = set()
    async with asyncio.TaskGroup() as tasks:
        while True:
            for folder in await asyncio.to_thread(find_runs, root):
                if folder not in shown:
                    shown.add(folder)
                    tasks.create_task(show_folder(databases, feed, folder, _key(folder)), name=f"show-{folder.name}")
            await asyncio.sleep(_SCAN_S)


def find_runs(root: Path) -> list[Path]:
    """The newest runs directly below a folder; of older ones, name the folder to see it."""
    found = [path for path in root.glob("*") if has_database(path)]
    return sorted(found, key=lambda path: (path / "postgres" / "PG_VERSION").stat().st_mtime)[-_MAX_FOLDERS:]


def _key(folder: Path) -> str:
    """The folder's name as a part of addresses."""
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in folder.name
    )
