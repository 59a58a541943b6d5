"""Changes in the databases as server-sent events: one connection listens, any number of browsers follow."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Annotated, Any

import psycopg
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy.engine import make_url

from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.schemas import LiveEvent
from cua_rl.monitor.security import CanRead

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/api/events", tags=["live"], dependencies=[CanRead], responses=REFUSALS)

_CHANNEL = "cua_rl"
_KEPT_EVENTS = 10_000
_QUEUE_SIZE = 1000
_MAX_FOLLOWERS = 128  # of one address: all browsers behind a proxy have the proxy's
_RETRY_S = 1.0
_KEEPALIVE_S = 15.0


@dataclass(eq=False, slots=True)
class Follower:
    """One client. `has_missed` means that it was too slow and must reload everything."""

    run_id: str | None
    peer: str = ""
    queue: asyncio.Queue[LiveEvent] = field(default_factory=lambda: asyncio.Queue(_QUEUE_SIZE))
    has_missed: bool = False


class LiveFeed:
    """Numbers events, keeps the latest for clients that reconnect, and passes them to all followers.

    Event ids identify the server process: after its restart, a client that reconnects is told to reload everything.
    """

    def __init__(self) -> None:
        self._epoch = token_hex(4)
        self._next = 1
        self._kept: deque[LiveEvent] = deque(maxlen=_KEPT_EVENTS)
        self._followers: set[Follower] = set()

    def publish(self, event: LiveEvent) -> None:
        """Number an event and pass it to the followers of its run."""
        event = event.model_copy(update={"event_id": f"{self._epoch}-{self._next}"})
        self._next += 1
        self._kept.append(event)
        for follower in self._followers:
            if not _concerns(event, follower.run_id):
                continue
            try:
                follower.queue.put_nowait(event)
            except asyncio.QueueFull:
                follower.has_missed = True

    def greeting(self, last_event_id: str | None, run_id: str | None) -> list[LiveEvent]:
        """The first events of a follower: those since `last_event_id`, or a `reset`."""
        here = f"{self._epoch}-{self._next - 1}"
        if not last_event_id:
            return [LiveEvent(event_id=here, kind="hello")]
        epoch, _, number = last_event_id.partition("-")
        oldest = self._next - len(self._kept)
        if epoch != self._epoch or not number.isdecimal() or not oldest - 1 <= int(number[:18]) < self._next:
            return [LiveEvent(event_id=here, kind="reset")]
        missed = list(self._kept)[int(number) + 1 - oldest :]
        return [LiveEvent(event_id=last_event_id, kind="hello")] + [e for e in missed if _concerns(e, run_id)]

    def has_room(self, peer: str) -> bool:
        """True if the client's address may have one more stream."""
        return sum(follower.peer == peer for follower in self._followers) < _MAX_FOLLOWERS

    async def follow(
        self, last_event_id: str | None, run_id: str | None, peer: str = ""
    ) -> AsyncGenerator[LiveEvent | None]:
        """Events of a run, or of all; None periodically, to keep the connection alive. Ends at once without room."""
        if not self.has_room(peer):  # streams that ask at the same moment are all told that there is some
            return
        follower = Follower(run_id=run_id, peer=peer)
        greeting = self.greeting(last_event_id, run_id)
        self._followers.add(follower)  # in one go with the greeting: nothing falls between them
        try:
            for event in greeting:
                yield event
            while True:
                try:
                    async with asyncio.timeout(_KEEPALIVE_S):
                        event = await follower.queue.get()
                except TimeoutError:
                    event = None
                yield event
                if follower.has_missed:
                    follower.has_missed = False
                    while not follower.queue.empty():
                        follower.queue.get_nowait()
                    yield LiveEvent(event_id=f"{self._epoch}-{self._next - 1}", kind="reset")
        finally:
            self._followers.discard(follower)


def _concerns(event: LiveEvent, run_id: str | None) -> bool:
    return run_id is None or event.run_id is None or event.run_id == run_id


@asynccontextmanager
async def listening(feed: LiveFeed, url: str, run_id_of: Callable[[int], str]) -> AsyncGenerator[None]:
    """Publish the notifications of a database over one connection while the context is open."""
    task = asyncio.create_task(_listen_forever(feed, url, run_id_of), name="monitor-listen")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _listen_forever(feed: LiveFeed, url: str, run_id_of: Callable[[int], str]) -> None:
    """Listen, reconnecting after errors; after a gap, followers are told to reload everything."""
    plain_url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    was_away = False
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(
                plain_url, autocommit=True, connect_timeout=3, keepalives_idle=10, keepalives_interval=5
            ) as connection:
                await connection.execute(f"LISTEN {_CHANNEL}")
                if was_away:
                    feed.publish(LiveEvent(event_id="", kind="reset"))
                    logger.warning("listening again")
                async for notify in connection.notifies():
                    event = parse_announcement(notify.payload, run_id_of)
                    if event is not None:
                        feed.publish(event)
        except psycopg.Error as error:
            if not was_away:
                logger.warning("cannot listen to the database, trying again: %s", str(error).strip().split("\n", 1)[0])
        was_away = True
        await asyncio.sleep(_RETRY_S)


def parse_announcement(payload: str, run_id_of: Callable[[int], str]) -> LiveEvent | None:
    """The event that a trigger announced; None for a notification of another program."""
    try:
        said: Any = json.loads(payload)
        return LiveEvent(
            event_id="",
            kind=said["kind"],
            run_id=run_id_of(int(said["training"])),
            phase=said.get("phase"),
            step=said.get("step"),
            group_id=said.get("group"),
            rollout_id=said.get("rollout"),
            turn_index=said.get("turn"),
            status=said.get("status"),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


async def feed_of(request: Request) -> LiveFeed:
    return request.app.state.feed


@router.get(
    "",
    response_class=StreamingResponse,
    responses={200: {"model": LiveEvent, "description": "text/event-stream; the data of each event is this JSON"}},
)
async def follow_events(
    request: Request,
    feed: Annotated[LiveFeed, Depends(feed_of)],
    run_id: Annotated[str | None, Query(max_length=300, description="only this run; all runs if omitted")] = None,
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> StreamingResponse:
    """Announce changes of runs, steps, evaluations, groups, rollouts, turns and verdicts.

    An event names what changed; fetch it by its route. With `Last-Event-ID`, missed events come first. The kinds
    `hello` (at the start) and `reset` (reload everything) concern the stream itself.
    """
    peer = request.client.host if request.client else ""
    if not feed.has_room(peer):
        raise HTTPException(
            429, f"expected at most {_MAX_FOLLOWERS} open event streams of one address, got more; close some pages"
        )

    async def lines() -> AsyncGenerator[str]:
        yield "retry: 1000\n\n"
        async for event in feed.follow(last_event_id, run_id, peer):
            if event is None:
                yield ": still here\n\n"
            else:
                yield f"id: {event.event_id}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)
