"""`DatabaseRecorder`: the run reports events, one task writes them; an outage of the database loses nothing."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Self

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from cua_rl.database.rows import Scope
from cua_rl.database.screenshots import StoreError, open_store
from cua_rl.database.session import make_writer_engine, shown_url
from cua_rl.database.writer import TimedEvent, write_events
from cua_rl.events import Event
from cua_rl.types.errors import DatabaseError, boundary, is_disk_full

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 512  # a turn holds two or more screenshots, so a full queue is at most some hundred MiB
_BATCH_SIZE = 64
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_HEARTBEAT_S = 15.0
_CLOSE_TIMEOUT_S = 30.0
# lost connections, among them those of a process that was asleep (25P03) or to a server that another one replaces
# (25006, read-only), deadlocks, a full disk, shutdowns
_PASSING_STATES = ("08", "25006", "25P03", "40", "53", "55", "57", "58")

WriteEvents = Callable[[Connection, Scope, Sequence[TimedEvent]], Scope]
"""Writes events, none as a heartbeat, and returns the scope of later events."""


_Mark = asyncio.Future[None]
"""In the queue: everything before it is durable once it is done."""


class DatabaseRecorder:
    """Writes one attempt of a run to Postgres; a `Recorder` and an async context manager.

    `record` returns as soon as the event is queued and waits only while the queue is full. A thread writes events in
    order, in transactions of up to 64. While the database is unreachable, the write is retried. If the database rejects
    an event (a bug), every later call raises `DatabaseError`. Leaving the context drains the queue, but waits at most
    30 s for a database that is unreachable. A transaction waits for more events: for `linger_s`, or, once somebody
    waits for it in `flush`, for `flush_linger_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        image_token_id: int,
        scope: Scope | None = None,
        write: WriteEvents = write_events,
        linger_s: float = 0.0,
        flush_linger_s: float = 0.0,
    ) -> None:
        self._shown_url = shown_url(url)
        self._engine: Engine = make_writer_engine(url)
        self._scope = scope or Scope(image_token_id=image_token_id)
        self._write = write
        self._linger_s = linger_s
        self._flush_linger_s = flush_linger_s
        self._is_due = asyncio.Event()
        self._queue: asyncio.Queue[TimedEvent | _Mark] = asyncio.Queue(maxsize=_QUEUE_SIZE)
        self._failure: DatabaseError | None = None
        self._writer: asyncio.Task[None] | None = None
        self._pending: list[TimedEvent] = []
        self._num_written = 0
        self._is_away = False

    @property
    def scope(self) -> Scope:
        """The attempt that owns the run, and the run once `TrainingStarted` has been written."""
        return self._scope

    @property
    def backlog(self) -> int:
        """Events that are not durable yet."""
        return self._queue.qsize() + len(self._pending)

    async def record(self, event: Event) -> None:
        """Queue an event; raises `DatabaseError` if an earlier one was refused."""
        self._raise_failure()
        await self._queue.put(TimedEvent(event=event, at=datetime.now(UTC)))
        if self._queue.qsize() >= _BATCH_SIZE:
            self._is_due.set()

    async def flush(self) -> None:
        """Wait until everything recorded so far is durable."""
        self._raise_failure()
        mark: _Mark = asyncio.get_running_loop().create_future()
        await self._queue.put(mark)
        self._is_due.set()
        await mark

    async def __aenter__(self) -> Self:
        store = open_store()
        if store is not None:
            await asyncio.to_thread(store.check)
        self._writer = asyncio.create_task(self._write_forever(), name="database-recorder")
        return self

    async def __aexit__(self, *error: object) -> None:
        flush = asyncio.create_task(self.flush(), name="last-flush")
        try:
            # drain the queue, however slow the database is, unless it is unreachable for too long
            while not flush.done():
                num_written = self._num_written
                await asyncio.wait([flush], timeout=_CLOSE_TIMEOUT_S)
                if not flush.done() and self._is_away and self._num_written == num_written:
                    raise DatabaseError(
                        f"expected to write the last {self.backlog} events to {self._shown_url!r} within "
                        f"{_CLOSE_TIMEOUT_S:.0f} s, but the database stayed unreachable; resume the run to repeat "
                        "their steps"
                    )
            await flush
        finally:
            flush.cancel()
            if self._writer is not None:
                self._writer.cancel()
                await asyncio.wait([self._writer])
            await asyncio.to_thread(self._engine.dispose)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _write_forever(self) -> None:
        while True:
            batch: list[TimedEvent | _Mark] = []
            with suppress(TimeoutError):  # with nothing queued, a heartbeat is due
                async with asyncio.timeout(_HEARTBEAT_S):
                    batch.append(await self._queue.get())
            if batch and self._linger_s and self._queue.qsize() < _BATCH_SIZE:
                await self._linger()
            while batch and len(batch) < _BATCH_SIZE and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            marks = [item for item in batch if isinstance(item, asyncio.Future)]
            self._pending = [item for item in batch if isinstance(item, TimedEvent)]
            is_heartbeat = not batch and self._scope.training_id is not None
            if self._failure is None and (self._pending or is_heartbeat):
                await self._write_with_retries()
            self._pending = []
            for mark in marks:
                if mark.done():
                    continue
                if self._failure is None:
                    mark.set_result(None)
                else:
                    mark.set_exception(self._failure)

    async def _linger(self) -> None:
        """Let more events join a transaction: most of its cost does not depend on its size."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                await self._is_due.wait()
                await asyncio.sleep(self._flush_linger_s)
        self._is_due.clear()

    async def _write_with_retries(self) -> None:
        """Write the pending events, retrying during an outage; a rejected event stops the recorder."""
        clock = asyncio.get_running_loop().time
        retry_s, away_since = _FIRST_RETRY_S, None
        while True:
            try:
                self._scope = await asyncio.to_thread(
                    _write_batch, self._engine, self._write, self._scope, self._pending
                )
                break
            except _Away as error:
                if away_since is None:
                    away_since, self._is_away = clock(), True
                    logger.warning("database away url=%s, trying again until it is back: %s", self._shown_url, error)
            except DatabaseError as error:
                logger.error("recording stopped: %s", error)
                self._failure = error
                return
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        self._is_away = False
        self._num_written += len(self._pending)
        if away_since is not None:
            logger.warning("database back url=%s away_s=%.1f, nothing lost", self._shown_url, clock() - away_since)


class _Away(DatabaseError):
    """The database is unreachable or temporarily cannot write: the write is retried."""


def _write_batch(engine: Engine, write: WriteEvents, scope: Scope, events: list[TimedEvent]) -> Scope:
    """Write one transaction; raises `_Away` if a retry may succeed, `DatabaseError` if not."""
    names = ", ".join(sorted({type(timed.event).__name__ for timed in events}))
    with boundary(DatabaseError, f"the database refused one of {names or 'no events'}"):
        try:
            with engine.begin() as connection:
                return write(connection, scope, events)
        except StoreError as error:
            raise _Away(str(error)) from error
        except DBAPIError as error:
            cause = error.orig
            state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
            is_lost = state is None and isinstance(error, OperationalError | InterfaceError)
            if is_lost or (state or "").startswith(_PASSING_STATES):
                engine.dispose()  # the next attempt reconnects, perhaps to another server
                said = str(error.orig).strip().splitlines()[0]
                raise _Away(f"disk full: {said}" if is_disk_full(said) else said) from error
            raise
