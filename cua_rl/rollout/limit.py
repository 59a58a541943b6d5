"""How many rollouts run at a time: a number that grows step by step and shrinks at once.

Additive increase, multiplicative decrease: as long as the model server keeps up, one more rollout per observation may
run (`growth`); when it runs out of room, the number falls by a quarter. So it settles just below what server and
machine can hold, whatever the length of the prompts.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cua_rl.rollout.group import Runner
from cua_rl.rollout.run import RolloutPlan
from cua_rl.types import Rollout

SHRINK = 0.75


@dataclass
class RolloutLimit:
    """Slots for rollouts, given out in the order in which they are asked for."""

    largest: int
    smallest: int = 1
    growth: float = 1.0
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
        """There is room: let a little more run, if what is allowed is used at all."""
        if self.num_running >= self.allowed:
            self._allowed = min(float(self.largest), self._allowed + self.growth)
            self._wake()

    def shrink(self) -> None:
        """There is no room: start nothing until a quarter of what runs has ended."""
        self._allowed = max(float(self.smallest), SHRINK * min(self._allowed, max(1, self.num_running)))

    async def acquire(self) -> None:
        """Wait for a slot; whoever gets it must give it back with `release`."""
        if not self._waiting and self.num_running < self.allowed:
            self.num_running += 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release()
            else:
                self._waiting.remove(granted)
            raise

    def release(self) -> None:
        """Give a slot back."""
        self.num_running -= 1
        self._wake()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Hold a slot for the length of the block."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    def _wake(self) -> None:
        while self._waiting and self.num_running < self.allowed:
            granted = self._waiting.popleft()
            if not granted.done():
                self.num_running += 1
                granted.set_result(None)


@dataclass
class LimitedRunner:
    """Runs rollouts when the limit has a slot for them; `num_granted` slots are held for the first ones already."""

    runner: Runner
    limit: RolloutLimit
    num_granted: int = 0

    async def run(self, plan: RolloutPlan) -> Rollout:
        """Run one rollout in a slot."""
        if self.num_granted:
            self.num_granted -= 1
        else:
            await self.limit.acquire()
        try:
            return await self.runner.run(plan)
        finally:
            self.limit.release()
