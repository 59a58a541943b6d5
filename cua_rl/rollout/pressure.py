"""Lets the number of concurrent rollouts follow what model server and machine can hold."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cua_rl.errors import SamplingError
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.sampling.load import ServerLoad
from cua_rl.system import free_memory_frac as measure_free_memory_frac

logger = logging.getLogger(__name__)

FULL_KV_CACHE = 0.95  # beyond this, new requests wait or preempt others
ROOMY_KV_CACHE = 0.80
LOW_MEMORY = 0.06  # share of the machine's memory that is left when starting more would be reckless
INTERVAL_S = 1.0


@dataclass
class Pressure:
    """Decides from one look after another; the number shrinks once per overload, not once per look."""

    limit: RolloutLimit
    _num_preemptions: int | None = None

    def observe(self, load: ServerLoad, free_memory_frac: float) -> None:
        """Shrink the limit if there is no room, grow it if there is."""
        last, self._num_preemptions = self._num_preemptions, load.num_preemptions
        is_preempting = last is not None and load.num_preemptions > last
        is_full = load.kv_cache_frac >= FULL_KV_CACHE and load.num_waiting > 0
        if is_preempting or is_full or free_memory_frac < LOW_MEMORY:
            if self.limit.num_running <= self.limit.allowed:  # else the last time still has to take effect
                self.limit.shrink()
                logger.info(
                    "fewer rollouts allowed=%d kv_cache=%.2f waiting=%d free_memory=%.2f",
                    *(self.limit.allowed, load.kv_cache_frac, load.num_waiting, free_memory_frac),
                )
        elif load.kv_cache_frac < ROOMY_KV_CACHE and not load.num_waiting:
            self.limit.grow()


async def follow_load(
    fetch_load: Callable[[], Awaitable[ServerLoad]], limit: RolloutLimit, interval_s: float = INTERVAL_S
) -> None:
    """Adapt the limit for ever; a look that fails is skipped, the server's owner deals with its death."""
    pressure = Pressure(limit)
    while True:
        await asyncio.sleep(interval_s)
        try:
            load = await fetch_load()
        except SamplingError as error:
            logger.debug("no look at the model server's load: %s", error)
            continue
        pressure.observe(load, await asyncio.to_thread(measure_free_memory_frac))
