"""Executions of gym servers as the devices of a run."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from math import ceil
from typing import Self

from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import PAID_DEVICES, DeviceOrder, Environment
from cua_rl.environments.device import AttachDevice, Device, DeviceAbilities
from cua_rl.environments.gym.client import MAX_CREATES, GymClient, Sleep
from cua_rl.environments.gym.device import GymDevice
from cua_rl.environments.gym.fields import Execution, GymTaskRef
from cua_rl.environments.gym.server import GymSource
from cua_rl.environments.pool import DeviceRequest
from cua_rl.types.errors import ConfigError, DeviceError, TaskError

logger = logging.getLogger(__name__)

GYM_ABILITIES = DeviceAbilities(name="a gym server", has_shell=False, is_seeded=False, environment="gym")


class GymExecutions:
    """A `DeviceBackend`: every lease is an execution of the task on its server, ended whatever happens.

    With `open_attach` the controller operates the devices; without it, the external agent does.
    """

    abilities = GYM_ABILITIES

    def __init__(
        self,
        settings: DeviceConfig,
        *,
        open_attach: Callable[[], AbstractAsyncContextManager[AttachDevice]] | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._open_attach = open_attach
        self._attach: AttachDevice | None = None
        self._stack = AsyncExitStack()
        self._settings = settings
        self._sleep = sleep
        self._clients: dict[str, GymClient] = {}
        self._leftovers: set[asyncio.Task[None]] = set()

    async def make(self, request: DeviceRequest) -> Device:
        """Make an execution and attach to its device; cancelled, it ends what may have been made."""
        task = request.world
        if not isinstance(task, GymTaskRef):
            raise TaskError(f"expected a task of a gym server, got {request.task_id!r}; run it on another device")
        client = self._clients.get(task.base_url)
        if client is None:
            client = self._clients[task.base_url] = GymClient(task.base_url, self._settings, self._sleep)
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


def _check_workers(num_workers: int, settings: DeviceConfig) -> None:
    if num_workers > settings.gym_parallel_creates:
        raise ConfigError(
            f"rollout_workers: expected at most gym_parallel_creates={settings.gym_parallel_creates} with a gym "
            f"server, got {num_workers}; raise the one or lower the other"
        )


def _make_backend(order: DeviceOrder) -> GymExecutions:
    open_attach = order.environments["gbox"].open_attach  # servers hold boxes
    if order.is_remote or open_attach is None:
        return GymExecutions(order.settings)
    attach = open_attach(order)
    return GymExecutions(order.settings, open_attach=lambda: attach)


def _lease_timeout_s(settings: DeviceConfig, max_devices: int) -> float:
    """Creations are queued, and each has its own limit."""
    num_rounds = ceil(max_devices / settings.gym_parallel_creates)
    return settings.lease_timeout_s * MAX_CREATES * num_rounds


GYM = Environment(
    name="gym",
    sources=(GymSource,),
    is_hosted=True,
    presets=PAID_DEVICES,
    make_backend=_make_backend,
    check_workers=_check_workers,
    lease_timeout_s=_lease_timeout_s,
)
