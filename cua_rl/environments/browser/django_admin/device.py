"""Browser pages, each with its own admin site."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.django_admin.server import SITE, AdminSite, make_empty_database
from cua_rl.environments.browser.django_admin.templates import ADMIN_BROWSER
from cua_rl.environments.browser.served_site import SiteServers
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool import DeviceRequest
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import remove_tree
from cua_rl.types.errors import ConfigError

_NOWHERE = "http://127.0.0.1:0/"


class AdminPages(BrowserPages):
    """The `DeviceBackend` of the admin site: contexts are new for every rollout, sites are used again."""

    abilities: DeviceAbilities = ADMIN_BROWSER

    def __init__(self, *, scale: float | None = None) -> None:
        if find_spec("django") is None:
            raise ConfigError(
                "expected Django for django_admin tasks, it is not installed; pip install 'cua_rl[browser]'"
            )
        # its pages do come to rest, however long a busy machine takes to serve them
        wanted = 1.0 if scale is None else scale
        super().__init__(PageSettings(allowed_urls=(_NOWHERE,), scale=wanted, settle_timeout_s=20.0))
        self._servers = SiteServers()
        self._folder = Path()
        self._empty_database: asyncio.Task[Path] | None = None

    async def make(self, request: DeviceRequest) -> Device:
        """A page whose site `task.prepare` resets."""
        made = self._empty_database
        if made is None or (made.done() and made.exception()):  # on first use
            made = self._empty_database = asyncio.create_task(make_empty_database(self._folder))
        site = AdminSite(empty_database=await asyncio.shield(made), served=await self._servers.take(SITE))
        return await self.lend(request.task_id, site=site)

    async def _open_sites(self) -> None:
        self._servers = await self._open_servers()
        self._folder = await asyncio.to_thread(make_scratch_folder, "admin")
        self._stack.callback(remove_tree, self._folder)
