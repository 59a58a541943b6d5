"""The browser pages on which MiniWoB++ tasks run."""

from types import TracebackType
from typing import Self

from cua_rl.devices.browser.backend import BrowserPages
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.devices.pool import DeviceRequest
from cua_rl.tasks.miniwob.pages import DEFAULT_SCALE, miniwob_settings
from cua_rl.tasks.miniwob.templates import MINIWOB_BROWSER

_MAX_IDLE_PAGES = 32


class MiniWobPages:
    """The `DeviceBackend` of MiniWoB++: pages are kept and begun again in place, which takes a tenth of a reload."""

    abilities: DeviceAbilities = MINIWOB_BROWSER

    def __init__(self, *, scale: float | None = None, max_idle: int = _MAX_IDLE_PAGES) -> None:
        self.pages = BrowserPages(miniwob_settings(DEFAULT_SCALE if scale is None else scale), max_idle=max_idle)

    async def make(self, request: DeviceRequest) -> Device:
        """A page, if possible one that shows the task already; `task.prepare` begins it."""
        return await self.pages.lend(request.task_id)

    async def __aenter__(self) -> Self:
        await self.pages.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pages.__aexit__(kind, error, trace)
