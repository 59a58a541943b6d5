"""Web pages as environments: MiniWoB++, a Django admin site, pages of the user's own, web sites of others."""

from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.expert import AdminExperts
from cua_rl.environments.browser.django_admin.templates import ADMIN_TEMPLATES
from cua_rl.environments.browser.miniwob.expert import MiniWobExperts
from cua_rl.environments.browser.miniwob.pages import DEFAULT_SCALE, HEIGHT, WIDTH, miniwob_settings
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER, all_templates, development_templates
from cua_rl.environments.browser.page_tasks import PageSource, UserPages
from cua_rl.environments.browser.web.tasks import WebPages, WebSource
from cua_rl.environments.contract import DeviceOrder, Environment, Loading, Source
from cua_rl.environments.device import Device, DeviceAbilities, Screen
from cua_rl.environments.pool import DeviceRequest
from cua_rl.tasks.task import Template

_MAX_IDLE_PAGES = 32


class MiniWobPages(BrowserPages):
    """The `DeviceBackend` of MiniWoB++: pages are kept and begun again in place, which takes a tenth of a reload."""

    abilities: DeviceAbilities = MINIWOB_BROWSER

    def __init__(self, *, scale: float | None = None, max_idle: int = _MAX_IDLE_PAGES) -> None:
        super().__init__(miniwob_settings(DEFAULT_SCALE if scale is None else scale), max_idle=max_idle)

    async def make(self, request: DeviceRequest) -> Device:
        """A page, if possible one that shows the task already; `task.prepare` begins it."""
        return await self.lend(request.task_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniWobSource(Source):
    """Pages of MiniWoB++: those for development, unless tasks are named or those for measuring asked for."""

    source_types = ("miniwob",)

    def load(self, loading: Loading) -> Sequence[Template]:
        return all_templates() if self.task_names or "measuring" in self.tags else development_templates()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSource(Source):
    """The tasks on a Django admin site."""

    source_types = ("django_admin",)

    def load(self, loading: Loading) -> Sequence[Template]:
        return ADMIN_TEMPLATES


def _screen(order: DeviceOrder, width_px: int = 1024, height_px: int = 768, scale: float = 1.0) -> Screen:
    return Screen(kind="browser", width_px=width_px, height_px=height_px).scaled(order.settings.browser_scale or scale)


MINIWOB = Environment(
    name="miniwob",
    sources=(MiniWobSource,),
    make_backend=lambda order: MiniWobPages(scale=order.settings.browser_scale),
    smallest_screen=lambda order: _screen(order, WIDTH, HEIGHT, DEFAULT_SCALE),
    experts=MiniWobExperts(),
)
DJANGO_ADMIN = Environment(
    name="django_admin",
    sources=(AdminSource,),
    make_backend=lambda order: AdminPages(scale=order.settings.browser_scale),
    smallest_screen=_screen,
    experts=AdminExperts(),
)
PAGE = Environment(
    name="page",
    sources=(PageSource,),
    has_held_out=False,  # its pages are the same for every seed
    make_backend=lambda order: UserPages(order.sources, scale=order.settings.browser_scale),
    smallest_screen=_screen,
)
WEB = Environment(
    name="web",
    sources=(WebSource,),
    has_held_out=False,  # a list is for training or for measuring
    make_backend=lambda order: WebPages(order.sources, scale=order.settings.browser_scale),
    smallest_screen=_screen,
    # rollouts wait for one another's places at their site
    lease_timeout_s=lambda settings, num: settings.lease_timeout_s + num * settings.task_timeout_s,
)
