"""The time that each stage of a rollout may take."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of the stages of a rollout, seconds; the pool has its own for the lease."""

    prepare_s: float = 300.0
    turn_s: float = 300.0
    """For model server and device together, from the end of one turn to the end of the next; beyond it is a fault."""
    agent_s: float = 1800.0
    """The policy's own time, while neither model server nor device works for it. It ends the rollout as turns do."""
    validate_s: float = 60.0


@asynccontextmanager
async def time_limit(stage: str, limit_s: float) -> AsyncGenerator[None]:
    """End the block after `limit_s` seconds: raises `TimeoutError` with a message; one from inside passes unchanged."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"expected {stage} to take at most {limit_s:g} s, it took longer") from error
