"""Devices are leased, never created in passing: the pool bounds how many live at once and always gets them back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from cua_rl.devices.device import Device
from cua_rl.errors import DeviceError, boundary
from cua_rl.tasks.task import Task

MakeDevice = Callable[[Task], Awaitable[Device]]


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
