"""The pool of devices: bounds how many exist at a time, leases them to rollouts, and always gets them back.

The bound counts devices that are being made, leased, idle or being closed. A device that its backend can reset is
leased again; all others are closed after one lease.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool_meter import PoolMeter
from cua_rl.types.errors import DeviceError, DeviceQuotaError, DeviceTimeoutError, SamplingError, boundary
from cua_rl.types.snapshot import Snapshot

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """What a device is leased for: a task instance, by name and seed, and the state in which the device begins."""

    task_id: str
    seed: int
    world: object = None
    """What the task's environment makes the device from; the pool only hands it on."""
    rollout_id: str = ""
    """For backends that label the devices they make."""
    snapshot: Snapshot | None = None
    """Of the device whose copy this one is, from a backend of `CopiedDevice`s."""


MakeDevice = Callable[[DeviceRequest], Awaitable[Device]]
ResetDevice = Callable[[Device, DeviceRequest], Awaitable[Device]]


class DeviceBackend(Protocol):
    """Makes the devices of a run.

    Entering it starts what its devices share and removes what a crashed run left behind; leaving it stops everything
    that it made.
    """

    @property
    def abilities(self) -> DeviceAbilities: ...

    async def make(self, request: DeviceRequest) -> Device:
        """A device on which the task can be prepared; raises `DeviceError`. It cleans up after itself if cancelled."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


@runtime_checkable
class ResettingBackend(Protocol):
    """A backend whose devices can be reused."""

    async def reset(self, device: Device, request: DeviceRequest) -> Device:
        """The device as if new; raises `DeviceError` if it is not healthy, and it is closed then."""
        ...


@runtime_checkable
class FiniteBackend(Protocol):
    """A backend with a fixed number of devices."""

    @property
    def num_devices(self) -> int:
        """How many; known once the backend is entered."""
        ...


class DeviceSource(Protocol):
    """Leases devices: a pool, or a share of one."""

    def lease(self, request: DeviceRequest) -> AbstractAsyncContextManager[Device]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Time limits, retries and rates for making and closing devices."""

    lease_timeout_s: float = 300.0
    """From a free slot to a device, all attempts together."""
    max_make_attempts: int = 4
    retry_first_s: float = 1.0
    """The first pause after a failure. Later ones double; each is drawn between half of it and all of it."""
    retry_longest_s: float = 30.0
    makes_per_s: float | None = None
    """Maximum creations per second; None is unlimited."""
    close_timeout_s: float = 60.0
    """Time limit for closing a device, and for a creation whose lease was cancelled."""


@dataclass(slots=True, kw_only=True)
class _Tenancy:
    """What one lease holds: a slot, and a device or the creation of one."""

    making: asyncio.Task[Device] | None = None
    device: Device | None = None
    is_healthy: bool = False


class DevicePool:
    """At most `max_devices` devices at a time. With `reset_device`, devices are reused after a healthy lease."""

    def __init__(
        self,
        make_device: MakeDevice,
        *,
        max_devices: int,
        reset_device: ResetDevice | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        self._make_device = make_device
        self._reset_device = reset_device
        self._limits = limits or PoolLimits()
        self._slots = asyncio.Semaphore(max_devices)
        self._idle: deque[Device] = deque()
        self._ending: set[asyncio.Task[None]] = set()
        self._next_make_at = 0.0
        self._silent_until = 0.0
        self._meter = PoolMeter(max_devices)

    @property
    def num_leased(self) -> int:
        return self._meter.num_leased

    @property
    def num_alive(self) -> int:
        """Devices that exist: leased, idle or being closed; creations in flight are not counted."""
        return self._meter.num_alive

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call; their names are in `cua_rl/metrics.py`."""
        return self._meter.take()

    @asynccontextmanager
    async def lease(self, request: DeviceRequest) -> AsyncGenerator[Device]:
        """Wait for a free slot and lease a device on which the task can be prepared.

        It is given back whatever happens, and before the lease ends, even if the lease is cancelled meanwhile.
        """
        started = time.monotonic()
        await self._slots.acquire()
        tenancy = _Tenancy()
        try:
            with boundary(DeviceError, f"make a device for task {request.task_id!r}"):
                device = await self._obtain_in_time(tenancy, request)
        except BaseException:
            ending = self._own(self._end(tenancy))
            if tenancy.making is None or tenancy.making.done():
                await wait_through(ending)  # a creation in flight is completed and closed in the background
            raise
        try:
            with self._meter.lease(time.monotonic() - started):
                await require_copy(device, request.snapshot)
                yield device
            tenancy.is_healthy = True
        except (DeviceError, TimeoutError) as error:
            self._meter.count_fault(error)
            raise
        except SamplingError:
            tenancy.is_healthy = True
            raise
        finally:
            await wait_through(self._own(self._end(tenancy)))

    def share(self, max_devices: int) -> "PoolShare":
        """A part of the pool, for a purpose that may not take all of it."""
        return PoolShare(self, max_devices)

    async def close(self) -> None:
        """Close idle devices and wait for leases that are ending; the pool leases nothing from here on."""
        while self._idle:
            device = self._idle.popleft()
            self._own(self._close(device))
        if self._ending:
            await wait_through(asyncio.create_task(asyncio.wait(set(self._ending)), name="end-pool"))

    async def _obtain_in_time(self, tenancy: _Tenancy, request: DeviceRequest) -> Device:
        limit = asyncio.timeout(self._limits.lease_timeout_s)
        try:
            async with limit:
                return await self._obtain(tenancy, request)
        except TimeoutError:
            if not limit.expired():
                raise
            error = DeviceTimeoutError(
                f"expected a device for task {request.task_id!r} within {self._limits.lease_timeout_s:g} s, got none; "
                "check the service that makes devices, or raise lease_timeout_s"
            )
            self._meter.count_fault(error)
            raise error from None

    async def _obtain(self, tenancy: _Tenancy, request: DeviceRequest) -> Device:
        device = await self._reuse(tenancy, request)
        attempt = 1
        while device is None:
            await self._pace()
            started = time.monotonic()
            tenancy.making = asyncio.ensure_future(self._make_device(request))
            try:
                device = tenancy.device = await asyncio.shield(tenancy.making)
            except DeviceError as error:
                self._meter.count_fault(error)
                if attempt >= self._limits.max_make_attempts:
                    raise
                level = logging.INFO
                if not self.num_alive and time.monotonic() >= self._silent_until:  # nothing goes on without any
                    level, self._silent_until = logging.WARNING, time.monotonic() + _SAY_EVERY_S
                logger.log(level, "waiting for a device: making one failed, try=%d: %s", attempt, error)
                tenancy.making = None
                await asyncio.sleep(self._pause_s(error, attempt))
                attempt += 1
            else:
                tenancy.making = None
                self._meter.count_made(time.monotonic() - started)
        return device

    async def _reuse(self, tenancy: _Tenancy, request: DeviceRequest) -> Device | None:
        """An idle device, reset; those that cannot be reset are closed."""
        while self._idle and self._reset_device is not None:
            tenancy.device = self._idle.popleft()
            try:
                tenancy.device = await self._reset_device(tenancy.device, request)
            except DeviceError as error:
                self._meter.count_fault(error)
                device, tenancy.device = tenancy.device, None
                await wait_through(self._own(self._close(device)))
            else:
                self._meter.num_reused += 1
                return tenancy.device
        return None

    async def _pace(self) -> None:
        """Wait until the rate limit allows another creation."""
        if self._limits.makes_per_s is None:
            return
        now = time.monotonic()
        at = max(now, self._next_make_at)
        self._next_make_at = at + 1 / self._limits.makes_per_s
        await asyncio.sleep(at - now)

    def _pause_s(self, error: DeviceError, attempt: int) -> float:
        longest = min(self._limits.retry_first_s * 2 ** (attempt - 1), self._limits.retry_longest_s)
        told = error.retry_after_s if isinstance(error, DeviceQuotaError) else None
        return max(told or 0.0, longest * random.uniform(0.5, 1.0))

    async def _end(self, tenancy: _Tenancy) -> None:
        """Keep or close what a lease held, then free its slot."""
        try:
            device = tenancy.device or await self._await_abandoned(tenancy.making)
            if device is not None and self._reset_device is not None and tenancy.is_healthy:
                self._idle.append(device)
            elif device is not None:
                await self._close(device)
        finally:
            self._slots.release()

    async def _await_abandoned(self, making: asyncio.Task[Device] | None) -> Device | None:
        """The device of a creation whose lease was cancelled; None if it failed or took too long."""
        if making is None:
            return None
        await asyncio.wait([making], timeout=self._limits.close_timeout_s)
        if not making.done():
            making.cancel()
            await asyncio.wait([making])
        if making.cancelled() or making.exception() is not None:
            return None
        self._meter.count_made(0.0)
        return making.result()

    async def _close(self, device: Device) -> None:
        try:
            with boundary(DeviceError, f"close device {device.device_id!r}"):
                async with asyncio.timeout(self._limits.close_timeout_s):
                    await device.close()
        except DeviceError as error:
            self._meter.count_fault(error)
            logger.warning("closing device_id=%s failed: %s", device.device_id, error)
        finally:
            self._meter.count_closed()

    def _own(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it as a task of the pool, which the cancellation of a lease does not reach."""
        task = asyncio.get_running_loop().create_task(ending, name="end-lease")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


class PoolShare:
    """Part of a pool: at most `max_devices` of its devices at a time."""

    def __init__(self, pool: DevicePool, max_devices: int) -> None:
        self._pool = pool
        self._slots = asyncio.Semaphore(max_devices)

    @asynccontextmanager
    async def lease(self, request: DeviceRequest) -> AsyncGenerator[Device]:
        """As `DevicePool.lease`."""
        async with self._slots, self._pool.lease(request) as device:
            yield device


async def require_copy(device: Device, snapshot: Snapshot | None) -> None:
    """Raise `DeviceError` unless the device is in the state of which it is a copy, if it is one."""
    if snapshot is None:
        return
    shown, expected = await device.observe(), snapshot.screen
    if (shown.sha256, shown.state) != (expected.sha256, expected.state):
        raise DeviceError(
            f"expected {device.device_id!r} to be a copy that shows {expected.sha256[:12]} in state "
            f"{expected.state[:12]!r}, got {shown.sha256[:12]} in {shown.state[:12]!r}; its environment makes no exact "
            "copies: set branching.num_siblings=0"
        )


@asynccontextmanager
async def open_pool(
    backend: DeviceBackend, *, max_devices: int, limits: PoolLimits | None = None
) -> AsyncGenerator[DevicePool]:
    """Enter the backend and lease its devices; at the end all of them are closed."""
    async with backend:
        if isinstance(backend, FiniteBackend):
            max_devices = min(max_devices, backend.num_devices)
        reset = backend.reset if isinstance(backend, ResettingBackend) else None
        pool = DevicePool(backend.make, max_devices=max_devices, reset_device=reset, limits=limits)
        try:
            yield pool
        finally:
            await pool.close()


async def wait_through(task: asyncio.Task[Any]) -> None:
    """Wait for `task` even if cancelled meanwhile; the cancellation is raised once the task has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
