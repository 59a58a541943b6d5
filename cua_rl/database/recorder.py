"""`DatabaseRecorder`: the run reports events, one task writes them, and an absent database delays but loses nothing."""

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from cua_rl.database.rows import Scope
from cua_rl.database.session import make_writer_engine, shown_url
from cua_rl.database.writer import TimedEvent, write_events, write_heartbeat
from cua_rl.errors import DatabaseError, boundary
from cua_rl.events import Event

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 512  # a turn holds two or more screenshots, so a full queue is at most some hundred MiB
_BATCH_SIZE = 64
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_HEARTBEAT_S = 15.0
_CLOSE_TIMEOUT_S = 30.0
_PASSING_STATES = ("08", "40", "53", "55", "57", "58")


@dataclass(frozen=True, slots=True)
class _Flush:
    """A mark in the queue: everything before it is durable once `done` is set."""

    done: asyncio.Future[None]


class DatabaseRecorder:
    """Writes one attempt of one training to Postgres, a `Recorder` and an async context manager.

    `record` returns as soon as the event is queued and waits only while the queue is full. Events are written in their
    order, in transactions of up to 64, in a thread. While the database is away, writing is tried again and again. An
    event that the database refuses (a bug) makes every later call raise `DatabaseError`. Leaving the context waits for
    what is queued, but at most 30 s for a database that is away.
    """

    def __init__(self, url: str, *, image_token_id: int) -> None:
        self._shown_url = shown_url(url)
        self._engine: Engine = make_writer_engine(url)
        self._scope = Scope(image_token_id=image_token_id)
        self._queue: asyncio.Queue[TimedEvent | _Flush] = asyncio.Queue(maxsize=_QUEUE_SIZE)
        self._failure: DatabaseError | None = None
        self._writer: asyncio.Task[None] | None = None
        self._pending: list[TimedEvent] = []
        self._num_written = 0
        self._is_away = False

    @property
    def training_id(self) -> int | None:
        """`trainings.id` of the run, known once `TrainingStarted` has been written."""
        return self._scope.training_id

    async def record(self, event: Event) -> None:
        """Queue an event; raises `DatabaseError` if an earlier one was refused."""
        self._raise_failure()
        await self._queue.put(TimedEvent(event=event, at=datetime.now(UTC)))

    async def flush(self) -> None:
        """Wait until everything recorded so far is durable."""
        self._raise_failure()
        flush = _Flush(asyncio.get_running_loop().create_future())
        await self._queue.put(flush)
        await flush.done

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_forever(), name="database-recorder")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._flush_at_end()
        finally:
            await self._close()

    async def _flush_at_end(self) -> None:
        """Write what is queued, however slow the database is, unless it is away for too long."""
        flush = asyncio.create_task(self.flush(), name="last-flush")
        try:
            while not flush.done():
                num_written = self._num_written
                await asyncio.wait([flush], timeout=_CLOSE_TIMEOUT_S)
                if not flush.done() and self._is_away and self._num_written == num_written:
                    num_lost = self._queue.qsize() + len(self._pending)
                    raise DatabaseError(
                        f"expected to write the last {num_lost} events to {self._shown_url!r} within "
                        f"{_CLOSE_TIMEOUT_S:.0f} s, but the database stayed away; resume the run "
                        "to do their steps again"
                    )
            await flush
        finally:
            flush.cancel()

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        await asyncio.to_thread(self._engine.dispose)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _write_forever(self) -> None:
        while True:
            batch = await self._next_batch()
            flushes = [item for item in batch if isinstance(item, _Flush)]
            self._pending = [item for item in batch if isinstance(item, TimedEvent)]
            is_heartbeat = not batch and self._scope.training_id is not None
            if self._failure is None and (self._pending or is_heartbeat):
                await self._write_with_retries()
            self._pending = []
            for flush in flushes:
                self._answer(flush)

    async def _next_batch(self) -> list[TimedEvent | _Flush]:
        """Whatever is queued, at least one item unless it is time for a heartbeat."""
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                batch = [await self._queue.get()]
        except TimeoutError:
            return []
        while len(batch) < _BATCH_SIZE and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    def _answer(self, flush: _Flush) -> None:
        if flush.done.done():
            return
        if self._failure is None:
            flush.done.set_result(None)
        else:
            flush.done.set_exception(self._failure)

    async def _write_with_retries(self) -> None:
        """Write the pending events, however long the database is away; a refusal becomes our failure."""
        clock = asyncio.get_running_loop().time
        retry_s, away_since = _FIRST_RETRY_S, None
        while True:
            try:
                self._scope = await asyncio.to_thread(_write_batch, self._engine, self._scope, self._pending)
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
    """The database cannot be reached, or cannot write just now: worth another try."""


def _write_batch(engine: Engine, scope: Scope, events: list[TimedEvent]) -> Scope:
    """One transaction; raises `_Away` if it may succeed later, `DatabaseError` if it never will."""
    names = ", ".join(sorted({type(timed.event).__name__ for timed in events}))
    with boundary(DatabaseError, f"the database refused one of {names or 'no events'}"):
        try:
            with engine.begin() as connection:
                if events:
                    return write_events(connection, scope, events)
                write_heartbeat(connection, scope, datetime.now(UTC))
                return scope
        except (OperationalError, InterfaceError) as error:
            if _is_passing(error):
                raise _Away(str(error.orig).strip().splitlines()[0]) from error
            raise


def _is_passing(error: DBAPIError) -> bool:
    """True for a lost connection, a shutdown, a full disk, a deadlock: classes of SQLSTATE that time can heal."""
    cause = error.orig
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    return state is None or state[:2] in _PASSING_STATES
