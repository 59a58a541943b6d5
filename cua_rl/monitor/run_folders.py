"""Runs with their own database: each run folder holds an embedded Postgres, which must run to be read.

While the run is in progress, its own server is used. Otherwise the monitor starts one, and stops it as soon as the run
resumes, so that training never finds its database in use.
"""

import asyncio
import logging
import os
import re
import time
from contextlib import AsyncExitStack, suppress
from itertools import chain, count
from pathlib import Path

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import read_own_database, running_postgres_url
from cua_rl.host.system import is_locked
from cua_rl.monitor.databases import Databases, RunFolder, open_database
from cua_rl.monitor.live import LiveFeed, listening
from cua_rl.monitor.schemas import LiveEvent
from cua_rl.types.errors import ConfigError, DatabaseError

logger = logging.getLogger(__name__)

RUN_LOCK = ".cua_rl.lock"
_POLL_S = 0.5
_SCAN_S = 2.0
_IDLE_S = 600.0


def has_database(folder: Path) -> bool:
    """Whether the folder belongs to a run with its own database."""
    return (folder / "postgres" / "PG_VERSION").is_file()


def is_in_use(folder: Path) -> bool:
    """Whether a run holds the folder's lock; the monitor never takes it."""
    return is_locked(folder / RUN_LOCK)


async def show_folder(databases: Databases, feed: LiveFeed, shown: RunFolder) -> None:
    """Show the folder's database, if its run is in progress or somebody opens it, until the folder is deleted."""
    folder, data = shown.path, shown.path / "postgres"
    while not shown.key or has_database(folder):  # opening it would make another one
        is_theirs = running_postgres_url(data) is not None
        if not is_theirs and not shown.wanted.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(shown.wanted.wait(), _SCAN_S)
            continue
        if not is_theirs and is_in_use(folder):
            await asyncio.sleep(_POLL_S)  # its server is about to start, or about to stop
            continue
        try:
            async with AsyncExitStack() as stack:
                url = await stack.enter_async_context(read_own_database(folder))
                if is_theirs:
                    await migrate(url)
                database = open_database(url, shown.key, pool_size=4, folder=folder)
                stack.push_async_callback(databases.remove, database)
                databases.add(database)
                await stack.enter_async_context(listening(feed, url, database.run_id))
                feed.publish(LiveEvent(event_id="", kind="reset"))
                # until the run's own server has stopped or, if it is ours, until the run resumes or no one looks
                while running_postgres_url(data) is not None if is_theirs else _is_needed(shown):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                if not is_theirs and not is_in_use(folder):
                    shown.wanted.clear()
        except (ConfigError, DatabaseError) as error:
            if isinstance(error, ConfigError) and not shown.key:  # nothing else is shown
                raise
            logger.warning("cannot show %s: %s", folder, str(error).split("\n", 1)[0])
            await asyncio.sleep(10 * _POLL_S)
        else:
            logger.info("the run in %s %s", folder, "has ended" if is_theirs else "goes on")
    del databases.folders[shown.key]
    feed.publish(LiveEvent(event_id="", kind="reset"))


def _is_needed(shown: RunFolder) -> bool:
    """Whether to keep our server for a folder: its run is not in progress, and somebody looked at it lately."""
    return not is_in_use(shown.path) and (shown.key == "" or time.monotonic() - shown.used_at < _IDLE_S)


async def show_runs_below(databases: Databases, feed: LiveFeed, root: Path) -> None:
    """Show all runs with their own databases below a folder, and runs that start later."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            known, found = {one.path for one in databases.folders.values()}, await asyncio.to_thread(find_runs, root)
            for folder in [one for one in found if one not in known]:
                # the folder's path below the root, as a part of run ids
                name = re.sub(r"[^A-Za-z0-9_.-]", "-", str(folder.relative_to(root)))[-90:].lstrip(".")
                names = chain((name,), (f"{name}-{n}" for n in count(2)))
                key = next(one for one in names if one not in databases.folders)
                databases.folders[key] = shown = RunFolder(key=key, path=folder)
                tasks.create_task(show_folder(databases, feed, shown), name=f"show-{folder.name}")
                feed.publish(LiveEvent(event_id="", kind="reset"))
            await asyncio.sleep(_SCAN_S)


def find_runs(root: Path) -> list[Path]:
    """All runs below a folder, however deep, the newest last; a run's own folder is not searched."""
    found: list[tuple[float, Path]] = []
    for path, folders, _ in os.walk(root):
        with suppress(OSError):  # no run, or one that is being deleted
            found.append(((Path(path) / "postgres" / "PG_VERSION").stat().st_mtime, Path(path)))
            folders.clear()
    return [folder for _, folder in sorted(found)]
