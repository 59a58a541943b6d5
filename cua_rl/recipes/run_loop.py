"""Which loop trains: synchronous, or asynchronous with bounded staleness; and how many rollouts run in it."""

import asyncio
import gc
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from cua_rl.recipes.train_config import CLIConfig
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.sync_loop import LoopSettings, Parts
from cua_rl.rollout.limit import LimitedRunner, RolloutLimit, follow_load
from cua_rl.sampling.client import SamplingClient


async def run_loop(
    config: CLIConfig, settings: LoopSettings, parts: Parts, start: AsyncStart, sampler: SamplingClient
) -> None:
    """Train to the end; the number of concurrent rollouts follows the model server's load if the run asks for it."""
    limit = RolloutLimit(
        largest=config.max_concurrent_rollouts, smallest=min(config.group_size, config.max_concurrent_rollouts)
    )
    freeze_loaded_objects()
    async with AsyncExitStack() as stack:
        if config.adaptive_concurrency:
            follower = asyncio.create_task(follow_load(sampler.fetch_load, limit), name="follow-load")
            stack.push_async_callback(_end, follower)
        if config.max_steps_off_policy:
            await async_loop.train(settings, parts, max_lag=config.max_steps_off_policy, limit=limit, start=start)
        else:
            await sync_loop.train(settings, replace(parts, runner=LimitedRunner(parts.runner, limit)))


def freeze_loaded_objects() -> None:
    """Have the garbage collector pass over what is loaded by now: it stays as long as the process.

    Every full collection walked over it and held the event loop for up to 0.3 s.
    """
    gc.collect()
    gc.freeze()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
