"""Runs with a database of their own: each run folder holds an embedded Postgres, which must run to be read.

While the run is in progress, its own server is used. Otherwise the monitor starts one, and stops it as soon as the run
resumes, so that training never finds its database in use.
"""

import asyncio
import logging
import re
from contextlib import AsyncExitStack
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
    """Whether the folder belongs to a run with its own database."""
    return (folder / "postgres" / "PG_VERSION").is_file()


def is_in_use(folder: Path) -> bool:
    """Whether a run holds the folder's lock; the monitor never takes it."""
    return is_locked(folder / RUN_LOCK)


async def show_folder(databases: Databases, feed: LiveFeed, folder: Path, key: str) -> None:
    """Show the folder's database for as long as the task runs."""
    data = folder / "postgres"
    while True:
        is_theirs = running_postgres_url(data) is not None
        if not is_theirs and is_in_use(folder):
            await asyncio.sleep(_POLL_S)  # its server is about to start, or about to stop
            continue
        try:
            async with AsyncExitStack() as stack:
                url = running_postgres_url(data)
                if url is None:
                    server = EmbeddedPostgres(data, folder / "logs" / "postgres.log")
                    url = (await stack.enter_async_context(server)).url
                await migrate(url)
                database = open_database(url, key, pool_size=4)
                stack.push_async_callback(databases.remove, database)
                databases.add(database)
                await stack.enter_async_context(listening(feed, url, database.run_id))
                feed.publish(LiveEvent(event_id="", kind="reset"))
                # until the run's own server has stopped or, if the server is ours, until the run resumes
                while running_postgres_url(data) is not None if is_theirs else not is_in_use(folder):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except DatabaseError as error:
            logger.warning("cannot show %s: %s", folder, str(error).split("\n", 1)[0])
            await asyncio.sleep(10 * _POLL_S)
        else:
            logger.info("the run in %s %s", folder, "has ended" if is_theirs else "goes on")


async def show_runs_below(databases: Databases, feed: LiveFeed, root: Path) -> None:
    """Show the newest runs with their own databases below a folder, and runs that start later."""
    shown: set[Path] = set()
    async with asyncio.TaskGroup() as tasks:
        while True:
            for folder in await asyncio.to_thread(find_runs, root):
                if folder not in shown:
                    shown.add(folder)
                    # the folder's name, as a part of run ids
                    key = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)
                    tasks.create_task(show_folder(databases, feed, folder, key), name=f"show-{folder.name}")
            await asyncio.sleep(_SCAN_S)


def find_runs(root: Path) -> list[Path]:
    """The newest runs directly below a folder; an older run is shown when its folder is named."""
    found = [path for path in root.glob("*") if has_database(path)]
    return sorted(found, key=lambda path: (path / "postgres" / "PG_VERSION").stat().st_mtime)[-_MAX_FOLDERS:]
