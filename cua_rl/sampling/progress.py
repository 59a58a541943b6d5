"""Waits for a model server as long as it makes progress, however long the answer is.

How long an answer takes depends on its length, which the policy decides and `max_tokens` limits. So a server is
not judged by the time of an answer but by its tokens: none in all its requests for a while, or so many for others that
this answer must have been among them, and it has stalled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cua_rl.sampling.load import ServerLoad
from cua_rl.types.errors import SamplingError

_T = TypeVar("_T")

_LOOKS = 4  # at the server, in the time after which it counts as stalled
_FAIR_SHARE = 4  # multiple of the other requests' tokens after which a request counts as lost


class ServerStalled(SamplingError):
    """The model server makes no progress with a request."""


async def wait_while_progressing(
    work: Awaitable[_T],
    read_load: Callable[[], Awaitable[ServerLoad | None]],
    *,
    stall_timeout_s: float,
    max_tokens: int,
) -> _T:
    """The result of `work`, a request that is cancelled when the server has stalled.

    No answer of the server, to any client, has more than `max_tokens`.

    `read_load` returns None if the server does not report its load; the time of the answer is then all that is known.
    Raises `ServerStalled` if the server made no progress for `stall_timeout_s`, or none with this request.
    """
    asked = asyncio.ensure_future(work)
    try:
        first: ServerLoad | None = None
        last: tuple[int, int] | None = None
        num_still, most_requests = 0, 1
        while True:
            await asyncio.wait({asked}, timeout=stall_timeout_s / _LOOKS)
            if asked.done():
                return asked.result()
            load = await read_load()
            seen = last if load is None else (load.num_tokens, load.num_prompt_tokens)
            num_still = num_still + 1 if last in (None, seen) else 0
            last = seen
            if num_still >= _LOOKS:
                raise ServerStalled(f"expected the model server to sample, got no token within {stall_timeout_s:g} s")
            if load is None:
                continue
            first = first or load
            num_tokens = load.num_tokens - first.num_tokens
            most_requests = max(most_requests, load.num_running + load.num_waiting)
            if num_tokens > _FAIR_SHARE * max_tokens * most_requests:
                raise ServerStalled(
                    f"expected an answer of at most {max_tokens} tokens, got none while the model server sampled "
                    f"{num_tokens} for at most {most_requests} requests at a time"
                )
    finally:
        asked.cancel()
