"""Web pages as environments: MiniWoB++, a Django admin site, pages of the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.expert import AdminExperts
from cua_rl.environments.browser.django_admin.templates import ADMIN_TEMPLATES
from cua_rl.environments.browser.miniwob.device import MiniWobPages
from cua_rl.environments.browser.miniwob.expert import MiniWobExperts
from cua_rl.environments.browser.miniwob.pages import DEFAULT_SCALE, HEIGHT, WIDTH
from cua_rl.environments.browser.miniwob.templates import all_templates, development_templates
from cua_rl.environments.browser.page_tasks import PageSource, UserPages
from cua_rl.environments.contract import DeviceOrder, Environment, Loading, Source
from cua_rl.environments.device import Screen
from cua_rl.tasks.task import Template


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
