"""Reports alerts that begin in runs: a line in the monitor's log, and a message to a webhook."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from html import escape

import httpx
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from cua_rl.database.models import Training
from cua_rl.host.masking import printable
from cua_rl.monitor.databases import Databases, NotFoundError
from cua_rl.monitor.run_summaries import summarise
from cua_rl.monitor.schemas import RunSummary

logger = logging.getLogger(__name__)

EVERY_S = 60.0
_TIMEOUT_S = 10.0
_NEWEST = 200  # runs of a database


_Known = dict[str, set[str]]
"""Kinds of alerts by run. What a run from before has when it is first seen is known: a new start of the monitor repeats
nothing.
"""


@asynccontextmanager
async def watching(
    databases: Databases, webhook: str | None, address: str, every_s: float = EVERY_S
) -> AsyncGenerator[None]:
    """Watch the runs of all open databases while the context is open; `address` is where people find the monitor."""
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False) as client:
        since, known = datetime.now(UTC), _Known()
        tell = partial(_announce, databases, since=since, client=client, webhook=webhook, address=address)
        known = await tell(known)
        task = asyncio.create_task(_watch_forever(tell, known, every_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _watch_forever(tell: Callable[[_Known], Awaitable[_Known]], known: _Known, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        known = await tell(known)


async def _announce(
    databases: Databases,
    known: _Known,
    *,
    since: datetime,
    client: httpx.AsyncClient,
    webhook: str | None,
    address: str,
) -> _Known:
    """Tell of alerts that are not known; returns those that are now. Of runs that began `since` then, none is known."""
    runs, unanswered = await _load_running(databases, known)
    now: _Known = {run_id: known[run_id] for run_id in unanswered}
    for run in runs:
        now[run.run_id] = {alert.kind for alert in run.alerts}
        before = known.get(run.run_id, set[str]() if run.started_at >= since else now[run.run_id])
        for kind in before - now[run.run_id]:
            logger.info("alert over run=%s kind=%s", run.run_name, kind)
        for alert in run.alerts:
            if alert.kind in before:
                continue
            logger.warning("alert run=%s kind=%s: %s", run.run_name, alert.kind, alert.message)
            said = {"run_id": run.run_id, "run_name": run.run_name, "kind": alert.kind}
            said["url"] = f"{address}/runs/{run.run_id}"
            # Slack obeys <...>, and other machines name their runs
            line = " ".join(printable(f"{run.alias or run.run_name}: {alert.message}").split())
            said["text"] = escape(line, quote=False)
            if webhook is not None and not await _has_sent(client, webhook, said):
                now[run.run_id].discard(alert.kind)  # once more in the next round
    return now


async def _load_running(databases: Databases, known: Iterable[str]) -> tuple[list[RunSummary], set[str]]:
    """The runs that go on, and the ids of known ones of which nobody can say whether they do."""
    found: list[RunSummary] = []
    for database in databases.all:
        query = select(Training).where(Training.status == "running").order_by(Training.id.desc()).limit(_NEWEST)
        try:
            async with database.sessions() as session:
                found += await summarise(session, database, list(await session.scalars(query)))
        except SQLAlchemyError as error:
            logger.info("a database does not answer (%s), its runs are not watched for now", type(error).__name__)
    unanswered: set[str] = set()
    for run_id in set(known) - {run.run_id for run in found}:  # ended, or killed together with its own database
        try:
            async with databases.open_run(run_id) as run:
                is_running = run.training.status == "running"
                found += await summarise(run.session, run.database, [run.training]) if is_running else []
        except (SQLAlchemyError, NotFoundError):
            unanswered.add(run_id)
    return found, unanswered


async def _has_sent(client: httpx.AsyncClient, webhook: str, said: Mapping[str, str]) -> bool:
    """Whether the webhook took the message. Its address is a secret, and in no line of the log."""
    try:
        status = (await client.post(webhook, json=said)).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.warning("the webhook does not accept alerts: %s", type(error).__name__)
        return False
    if not 200 <= status < 300:
        logger.warning("the webhook does not accept alerts: status %s", status)
    return 200 <= status < 300
