"""Devices are leased, never created in passing: the pool bounds how many live at once and always gets them back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.errors import DeviceError, boundary
from cua_rl.tasks.task import Task

MakeDevice = Callable[[Task], Awaitable[Device]]


class DeviceBackend(Protocol):
    """Where the devices of a run come from.

    Entering it starts what its devices share and removes what a crashed run left behind; leaving it ends everything it
    made.
    """

    @property
    def abilities(self) -> DeviceAbilities: ...

    async def make(self, task: Task) -> Device:
        """A device on which `task` can be prepared; raises `DeviceError`."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DevicePool:
    """At most `max_devices` devices at a time, each made for one task instance and closed after one rollout."""

    def __init__(self, make_device: MakeDevice, *, max_devices: int, make_timeout_s: float = 300.0) -> None:
        self._make_device = make_device
        self._make_timeout_s = make_timeout_s
        self._slots = asyncio.Semaphore(max_devices)
        self.num_leased = 0

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncGenerator[Device]:
        """Wait for a free slot and lend a device prepared for `task`; it is given back even if the rollout is
        cancelled.
        """
        async with self._slots:
            with boundary(DeviceError, f"make a device for task {task.task_id!r}"):
                async with asyncio.timeout(self._make_timeout_s):
                    device = await self._make_device(task)
            self.num_leased += 1
            try:
                yield device
            finally:
                self.num_leased -= 1
                await asyncio.shield(device.close())
