"""Executions of gym servers as the devices of a run."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.gym.client import GymClient, GymLimits
from cua_rl.environments.gym.device import AttachDevice, GymDevice
from cua_rl.environments.gym.fields import Execution, GymTaskRef
from cua_rl.environments.pool import DeviceRequest
from cua_rl.errors import DeviceError, TaskError

logger = logging.getLogger(__name__)

GYM = DeviceAbilities(name="a gym server", has_shell=False, is_seeded=False, task_backend="gym")


class GymExecutions:
    """A `DeviceBackend`: every lease is an execution of the task on its server, ended whatever happens.

    With `open_attach` the controller operates the devices; without it, the external agent does.
    """

    abilities = GYM

    def __init__(
        self,
        *,
        open_attach: Callable[[], AbstractAsyncContextManager[AttachDevice]] | None = None,
        limits: GymLimits | None = None,
    ) -> None:
        self._open_attach = open_attach
        self._attach: AttachDevice | None = None
        self._stack = AsyncExitStack()
        self._limits = limits
        self._clients: dict[str, GymClient] = {}
        self._leftovers: set[asyncio.Task[None]] = set()

    async def make(self, request: DeviceRequest) -> Device:
        """Make an execution and attach to its device; cancelled, it ends what may have been made."""
        task = request.gym
        if task is None:
            raise TaskError(f"expected a task of a gym server, got {request.task_id!r}; run it on another device")
        client = self._clients.get(task.base_url)
        if client is None:
            client = self._clients[task.base_url] = GymClient(task.base_url, self._limits)
        creating = asyncio.create_task(client.create(task), name=f"create-{task.identifier}")
        try:
            execution = await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._clean_up(client, task, creating)
            raise
        try:
            device: Device | None = None
            if self._attach is not None and execution.device_id is not None:
                device = await self._attach(execution.device_id)
            elif self._attach is not None:
                raise DeviceError(
                    f"expected the device of execution {execution.execution_id!r}, got an answer without one"
                )
        except BaseException:
            await asyncio.shield(client.terminate(task, execution))
            raise
        return GymDevice(client, task, execution, device)

    def _clean_up(self, client: GymClient, task: GymTaskRef, creating: asyncio.Task[Execution]) -> None:
        """The server may be making the execution already: wait for it in the background, and end it."""

        async def end() -> None:
            try:
                execution = await creating
            except DeviceError:
                return
            await client.terminate(task, execution)

        ending = asyncio.create_task(end(), name=f"end-{task.identifier}")
        self._leftovers.add(ending)
        ending.add_done_callback(self._leftovers.discard)

    async def __aenter__(self) -> Self:
        if self._open_attach is not None:
            self._attach = await self._stack.enter_async_context(self._open_attach())
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*self._leftovers)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        await self._stack.aclose()
