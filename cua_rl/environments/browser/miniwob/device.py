"""The browser pages on which MiniWoB++ tasks run."""

from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.miniwob.pages import DEFAULT_SCALE, miniwob_settings
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool import DeviceRequest

_MAX_IDLE_PAGES = 32


class MiniWobPages(BrowserPages):
    """The `DeviceBackend` of MiniWoB++: pages are kept and begun again in place, which takes a tenth of a reload."""

    abilities: DeviceAbilities = MINIWOB_BROWSER

    def __init__(self, *, scale: float | None = None, max_idle: int = _MAX_IDLE_PAGES) -> None:
        super().__init__(miniwob_settings(DEFAULT_SCALE if scale is None else scale), max_idle=max_idle)

    async def make(self, request: DeviceRequest) -> Device:
        """A page, if possible one that shows the task already; `task.prepare` begins it."""
        return await self.lend(request.task_id)
