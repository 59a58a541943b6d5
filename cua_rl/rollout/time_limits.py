"""Time limits of the stages of a rollout."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of the stages of a rollout, seconds; the pool has its own for the lease."""

    prepare_s: float = 300.0
    turn_s: float = 300.0
    """For the device in one turn, and for a model server without progress; exceeding it is a fault."""
    agent_s: float = 1800.0
    """Budget for the policy's own time in the whole rollout; exceeding it ends the rollout like the turn limit."""
    validate_s: float = 60.0


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
