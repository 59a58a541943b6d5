"""Separates the policy's time from the time that model server and device take to work for it.

What the policy decides must end as a result, and what infrastructure does as a fault. If slow failures were dropped as
faults, success rates would be biased: mostly successes would remain. So the policy has a time budget for the waits that
it asks for (and for what an agent outside this process does between its requests), which ends the rollout as the turn
limit does. Model server and device have a time limit per turn; a call that exceeds it is a fault. Neither is charged
with the other's time.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf

from cua_rl.actions import Action, Wait
from cua_rl.conversation import EncodedImage
from cua_rl.devices.device import Device, DeviceKind


class RolloutClock:
    """Counts down either the policy's time budget or the turn's time limit for model server and device, never both.

    The policy's time runs while the device executes a wait that it asked for. For an agent outside this process, which
    acts between its calls of model and device, it also runs whenever no call is under way (`charge_between_calls`).
    """

    def __init__(self, *, policy_s: float = inf, turn_s: float = inf) -> None:
        self._acts_between_calls = False
        self._turn_s = self._turn_left_s = turn_s
        self._policy_left_s = policy_s
        self._num_calls = 0
        self._num_waits = 0
        """Calls under way in which the device only does the waiting that was asked for."""
        self._since = asyncio.get_running_loop().time()
        self._turn_limit = asyncio.timeout(None)
        self._changed = asyncio.Event()

    @property
    def policy_left_s(self) -> float:
        """The rest of the policy's time budget; 0 if it is used up."""
        self._count()
        return max(0.0, self._policy_left_s)

    @property
    def is_used_up(self) -> bool:
        return self.policy_left_s == 0.0

    async def used_up(self) -> None:
        """Wait until the policy's time is used up."""
        while left_s := self.policy_left_s:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if self._is_policys else None):
                    await self._changed.wait()

    def charge_between_calls(self) -> None:
        """From here on, time between calls is the policy's."""
        self._count()
        self._acts_between_calls = True
        self._go_on()

    def next_turn(self) -> None:
        """Restart the time limit of model server and device."""
        self._count()
        self._turn_left_s = self._turn_s
        self._go_on()

    def credit(self, seconds: float) -> None:
        """Give the policy back time that turned out not to be its own; negative to charge it."""
        self._count()
        self._policy_left_s += seconds
        self._go_on()

    @contextmanager
    def call(self) -> Generator[None]:
        """Model server or device works while the block runs."""
        self._count()
        self._num_calls += 1
        self._go_on()
        try:
            yield
        finally:
            self._count()
            self._num_calls -= 1
            self._go_on()

    @contextmanager
    def wait(self, duration_s: float) -> Generator[None]:
        """Inside a `call`: charge the policy for the wait that it asked for, and the device for any time beyond it."""
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._count()
                self._num_waits -= 1
                self._go_on()

        self._count()
        self._num_waits += 1
        self._go_on()
        timer = asyncio.get_running_loop().call_later(duration_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """End the block with a `TimeoutError` if model server and device take too long for a turn."""
        try:
            async with self._turn_limit:
                self._since = asyncio.get_running_loop().time()
                self._go_on()
                yield
        except TimeoutError as error:
            if not self._turn_limit.expired():
                raise
            raise TimeoutError(
                f"expected model server and device to take at most {self._turn_s:g} s for a turn, they took longer"
            ) from error

    @property
    def _is_policys(self) -> bool:
        return self._num_calls == self._num_waits and (self._acts_between_calls or self._num_waits > 0)

    def _count(self) -> None:
        """Charge the time since the last change to its owner."""
        now = asyncio.get_running_loop().time()
        passed_s, self._since = now - self._since, now
        if self._is_policys:
            self._policy_left_s -= passed_s
        else:
            self._turn_left_s -= passed_s

    def _go_on(self) -> None:
        when = None if self._is_policys else asyncio.get_running_loop().time() + self._turn_left_s
        with suppress(RuntimeError):  # not entered yet, left already, or about to end what it limits
            self._turn_limit.reschedule(when)
        self._changed.set()


@dataclass(frozen=True, slots=True)
class TimedDevice:
    """A device that charges its work to its own time limit, and the waits that it is asked for to the policy's budget.

    A wait that exceeds the rest of the budget is cut short.
    """

    device: Device
    clock: RolloutClock

    @property
    def device_id(self) -> str:
        return self.device.device_id

    @property
    def kind(self) -> DeviceKind:
        return self.device.kind

    async def observe(self) -> EncodedImage:
        with self.clock.call():
            return await self.device.observe()

    async def execute(self, action: Action) -> None:
        with self.clock.call():
            if not isinstance(action, Wait):
                await self.device.execute(action)
                return
            left_s = self.clock.policy_left_s
            with self.clock.wait(min(action.duration_s, left_s)):
                await self.device.execute(replace(action, duration_s=min(action.duration_s, left_s)))
            if action.duration_s >= left_s:
                self.clock.credit(-left_s)

    async def query(self, name: str) -> str:
        return await self.device.query(name)

    async def close(self) -> None:
        await self.device.close()
