"""Ends the stages of a rollout that take too long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


@asynccontextmanager
async def time_limit(stage: str, limit_s: float) -> AsyncGenerator[None]:
    """Raise `TimeoutError` with a message after `limit_s` seconds; one that the block itself raises is not changed."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"expected {stage} to take at most {limit_s:g} s, it took longer") from error
