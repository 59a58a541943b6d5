"""Browser pages, each with an admin site of its own."""

import asyncio
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from cua_rl.devices.browser.backend import BrowserPages
from cua_rl.devices.browser.settings import PageSettings
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.devices.pool import DeviceRequest
from cua_rl.errors import ConfigError
from cua_rl.scratch import make_scratch_folder
from cua_rl.tasks.django_admin.server import AdminSite, make_empty_database, start_site
from cua_rl.tasks.django_admin.templates import ADMIN_BROWSER

_NOWHERE = "http://127.0.0.1:0/"


class AdminPages(BrowserPages):
    """The `DeviceBackend` of the admin site: contexts are new for every rollout, sites are used again."""

    abilities: DeviceAbilities = ADMIN_BROWSER

    def __init__(self, *, scale: float | None = None) -> None:
        if find_spec("django") is None:
            raise ConfigError(
                "expected Django for django_admin tasks, it is not installed; pip install 'cua_rl[browser]'"
            )
        scale = 1.0 if scale is None else scale
        # its pages do come to rest, however long a busy machine takes to serve them
        super().__init__(PageSettings(allowed_urls=(_NOWHERE,), scale=scale, settle_timeout_s=20.0))
        self._idle_sites: list[AdminSite] = []
        self._sites: list[AdminSite] = []
        self._folder: Path | None = None
        self._empty_database: asyncio.Task[Path] | None = None

    async def make(self, request: DeviceRequest) -> Device:
        """A page whose site `task.prepare` resets."""
        site = self._idle_sites.pop() if self._idle_sites else await self._start_site()
        try:
            return await self.lend(request.task_id, site=site)
        except BaseException:
            await site.release()
            raise

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(make_scratch_folder, "admin")
        return await super().__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await asyncio.gather(*(site.stop() for site in self._sites))
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _start_site(self) -> AdminSite:
        """Create the empty database on first use."""
        assert self._folder is not None, "the pages were never entered"
        if self._empty_database is None or (self._empty_database.done() and self._empty_database.exception()):
            self._empty_database = asyncio.create_task(make_empty_database(self._folder))
        site = await start_site(await asyncio.shield(self._empty_database), self._idle_sites)
        self._sites.append(site)
        return site
