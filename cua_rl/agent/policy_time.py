"""Separates the policy's time from the time that a device takes.

A rollout that the policy delays must end with a result, one that infrastructure delays with a fault. If slow failures
of the policy were dropped as faults, mostly successes would remain and success rates would be biased. So the policy has
a time budget for the waits that it asks for (and, for an agent outside this process, for the time between its
requests); exceeding it ends the rollout like the turn limit. The device has a time limit per turn; exceeding it is a
fault. Neither is charged for the other's time, nor for sampling: how long a response takes depends on its length, which
`max_tokens` limits, and the sampling client notices a model server that makes no progress.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf

from cua_rl.environments.device import DeviceAround
from cua_rl.types.actions import Action, Wait
from cua_rl.types.conversation import EncodedImage


class RolloutClock:
    """Counts down either the policy's time budget or the time limit of the device, never both.

    The policy is charged while the device executes a wait that it asked for. An agent outside this process is also
    charged between its calls of model and device (`charge_between_calls`).
    """

    def __init__(self, *, task_timeout_s: float = inf, turn_timeout_s: float = inf) -> None:
        self._acts_between_calls = False
        self._turn_s = self._turn_left_s = turn_timeout_s
        self._policy_left_s = task_timeout_s
        self._num_pauses = 0
        self._num_calls = 0
        self._num_waits = 0
        """Calls in which the device is executing a wait that the policy asked for."""
        self._since = asyncio.get_running_loop().time()
        self._turn_limit = asyncio.timeout(None)
        self._changed = asyncio.Event()

    @property
    def policy_left_s(self) -> float:
        """The rest of the policy's time budget; 0 if it is used up."""
        self._charge()
        return max(0.0, self._policy_left_s)

    @property
    def is_used_up(self) -> bool:
        return self.policy_left_s == 0.0

    @property
    def is_uncharged(self) -> bool:
        """Whether time passes now without charging any budget."""
        return self._num_pauses > 0

    async def used_up(self) -> None:
        """Wait until the policy's time is used up."""
        while left_s := self.policy_left_s:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if self._charges_policy else None):
                    await self._changed.wait()

    def charge_between_calls(self) -> None:
        """From here on, time between calls is the policy's."""
        with self._accounted():
            self._acts_between_calls = True

    def next_turn(self) -> None:
        """Restart the time limit of the device."""
        with self._accounted():
            self._turn_left_s = self._turn_s

    def credit(self, seconds: float) -> None:
        """Return time to the policy's budget that was charged by mistake; negative to charge more."""
        with self._accounted():
            self._policy_left_s += seconds

    @contextmanager
    def call(self) -> Generator[None]:
        """The block is a call of model server or device."""
        with self._accounted():
            self._num_calls += 1
        try:
            yield
        finally:
            with self._accounted():
                self._num_calls -= 1

    @contextmanager
    def uncharged(self) -> Generator[None]:
        """The block charges no budget: the model samples, or the database is unreachable."""
        with self._accounted():
            self._num_pauses += 1
        try:
            yield
        finally:
            with self._accounted():
                self._num_pauses -= 1

    @contextmanager
    def wait(self, duration_s: float) -> Generator[None]:
        """Inside a `call`: charge the policy for the wait that it asked for, and the device for any time beyond it."""
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                with self._accounted():
                    self._num_waits -= 1

        with self._accounted():
            self._num_waits += 1
        timer = asyncio.get_running_loop().call_later(duration_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """Raise `TimeoutError` in the block if the device takes too long for a turn."""
        try:
            async with self._turn_limit:
                self._since = asyncio.get_running_loop().time()
                self._rearm()
                yield
        except TimeoutError as error:
            if not self._turn_limit.expired():
                raise
            raise TimeoutError(
                f"expected the device to take at most {self._turn_s:g} s for a turn, it took longer"
            ) from error

    @property
    def _charges_policy(self) -> bool:
        is_policys = self._num_calls == self._num_waits and (self._acts_between_calls or self._num_waits > 0)
        return is_policys and not self._num_pauses

    @contextmanager
    def _accounted(self) -> Generator[None]:
        """The block changes who is charged, or what is left: charge up to here, and continue with what it sets."""
        self._charge()
        yield
        self._rearm()

    def _charge(self) -> None:
        """Charge the time since the last change to its owner."""
        now = asyncio.get_running_loop().time()
        passed_s, self._since = now - self._since, now
        if self._charges_policy:
            self._policy_left_s -= passed_s
        elif not self._num_pauses:
            self._turn_left_s -= passed_s

    def _rearm(self) -> None:
        """Reset the time limit of the device, or suspend it while the policy is charged."""
        is_stopped = self._num_pauses or self._charges_policy
        when = None if is_stopped else asyncio.get_running_loop().time() + self._turn_left_s
        # the block has not begun (an AssertionError before Python 3.11.4), has ended, or is being cancelled
        with suppress(RuntimeError, AssertionError):
            self._turn_limit.reschedule(when)
        self._changed.set()


@dataclass(frozen=True, slots=True)
class TimedDevice(DeviceAround):
    """A device that charges waits to the policy, cut short when its budget ends, and other work to itself."""

    clock: RolloutClock

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
