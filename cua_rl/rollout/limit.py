"""Limits concurrent rollouts to what model server and machine can hold.

Additive increase, multiplicative decrease: while the model server keeps up, each measurement of its load raises the
limit by one rollout; when the server is overloaded, the limit falls by a quarter. So it settles just below
the capacity of server and machine, for prompts of any length.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cua_rl.host.system import free_memory_frac as measure_free_memory_frac
from cua_rl.rollout.group import Runner
from cua_rl.rollout.run import RolloutJob
from cua_rl.sampling.load import ServerLoad
from cua_rl.types.errors import SamplingError
from cua_rl.types.rollout import Rollout

logger = logging.getLogger(__name__)

SHRINK = 0.75
FULL_KV_CACHE = 0.95  # beyond this, new requests wait or preempt others
ROOMY_KV_CACHE = 0.80
LOW_MEMORY = 0.06  # free share of the machine's memory below which no more rollouts start
INTERVAL_S = 1.0


@dataclass
class RolloutLimit:
    """Slots for rollouts, granted in the order of requests, with repeated rollouts first."""

    largest: int
    smallest: int = 1
    num_running: int = 0
    _allowed: float = field(init=False)
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])

    def __post_init__(self) -> None:
        self._allowed = float(self.largest)

    @property
    def allowed(self) -> int:
        """How many rollouts may run now."""
        return int(self._allowed)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def grow(self) -> None:
        """Raise the limit by one rollout, unless it is not reached."""
        if self.num_running >= self.allowed:
            self._allowed = min(float(self.largest), self._allowed + 1)
            self._wake()

    def shrink(self) -> None:
        """Lower the limit by a quarter of the running rollouts, so that none start until that many have ended."""
        self._allowed = max(float(self.smallest), SHRINK * min(self._allowed, max(1, self.num_running)))

    async def acquire(self, *, is_repeat: bool = False) -> None:
        """Wait for a slot; `release` returns it."""
        if not self._waiting and self.num_running < self.allowed:
            self.num_running += 1
            return
        granted = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_repeat else self._waiting.append)(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release()
            elif granted in self._waiting:  # `_wake` may have removed it already
                self._waiting.remove(granted)
            raise

    def release(self) -> None:
        """Return a slot."""
        self.num_running -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.num_running < self.allowed:
            granted = self._waiting.popleft()
            if not granted.done():
                self.num_running += 1
                granted.set_result(None)


@dataclass
class LimitedRunner:
    """Runs each rollout in a slot of the limit; the first `num_granted` use slots that the caller already holds."""

    runner: Runner
    limit: RolloutLimit
    num_granted: int = 0

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout in a slot."""
        if self.num_granted:
            self.num_granted -= 1
        else:
            await self.limit.acquire(is_repeat=bool(job.failed_in))
        try:
            return await self.runner.run(job)
        finally:
            self.limit.release()


@dataclass
class Pressure:
    """Adjusts the limit by successive measurements of the load; it shrinks once per overload, not per measurement."""

    limit: RolloutLimit
    _num_preemptions: int | None = None

    def observe(self, load: ServerLoad, free_memory_frac: float) -> None:
        """Shrink the limit if server or memory is overloaded, grow it if both have spare capacity."""
        last, self._num_preemptions = self._num_preemptions, load.num_preemptions
        is_preempting = last is not None and load.num_preemptions > last
        is_full = load.kv_cache_frac >= FULL_KV_CACHE and load.num_waiting > 0
        if is_preempting or is_full or free_memory_frac < LOW_MEMORY:
            if self.limit.num_running <= self.limit.allowed:  # else the last reduction has not taken effect yet
                self.limit.shrink()
                logger.info(
                    "fewer rollouts allowed=%d kv_cache=%.2f waiting=%d free_memory=%.2f",
                    *(self.limit.allowed, load.kv_cache_frac, load.num_waiting, free_memory_frac),
                )
        elif load.kv_cache_frac < ROOMY_KV_CACHE and not load.num_waiting:
            self.limit.grow()


async def follow_load(fetch_load: Callable[[], Awaitable[ServerLoad]], limit: RolloutLimit) -> None:
    """Adapt the limit until cancelled. A failed measurement is skipped: the server's owner handles its end."""
    pressure = Pressure(limit)
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            load = await fetch_load()
        except SamplingError as error:
            logger.debug("cannot read the model server's load: %s", error)
            continue
        pressure.observe(load, await asyncio.to_thread(measure_free_memory_frac))
