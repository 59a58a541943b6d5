"""Server-sent events: what changes, the moment it is stored."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from cua_rl.monitor.live import LiveFeed
from cua_rl.monitor.run_routes import REFUSALS
from cua_rl.monitor.schemas import LiveEvent
from cua_rl.monitor.security import CanRead

router = APIRouter(prefix="/api/events", tags=["live"], dependencies=[CanRead], responses=REFUSALS)


def feed_of(request: Request) -> LiveFeed:
    return request.app.state.feed


@router.get(
    "",
    response_class=StreamingResponse,
    responses={200: {"model": LiveEvent, "description": "text/event-stream; the data of each event is this JSON"}},
)
async def follow_events(
    feed: Annotated[LiveFeed, Depends(feed_of)],
    run_id: Annotated[str | None, Query(max_length=300, description="only this run; all of them if left out")] = None,
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> StreamingResponse:
    """Announce changes of runs, steps, evaluations, groups, rollouts, turns and verdicts.

    An event names what changed; ask for it by its route. With `Last-Event-ID`, what was missed comes first. The kinds
    `hello` (at the start) and `reset` (load everything anew) are about the stream itself.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = _lines(feed.follow(last_event_id, run_id))
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _lines(events: AsyncGenerator[LiveEvent | None]) -> AsyncGenerator[str]:
    yield "retry: 1000\n\n"
    async for event in events:
        if event is None:
            yield ": still here\n\n"
        else:
            yield f"id: {event.event_id}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"
