"""Event streams of one address."""

import asyncio

from cua_rl.monitor.live import LiveFeed


async def test_streams_that_ask_at_the_same_moment_get_no_more_than_their_share() -> None:
    feed = LiveFeed()
    assert feed.has_room("peer")
    streams = [feed.follow(None, None, "peer") for _ in range(600)]

    first = await asyncio.gather(*(anext(stream, None) for stream in streams))

    assert not feed.has_room("peer")
    assert sum(event is not None for event in first) == 128
    for stream in streams:
        await stream.aclose()
    assert feed.has_room("peer")
