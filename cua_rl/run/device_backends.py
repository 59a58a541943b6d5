"""From what the user asked for to where devices come from."""

from importlib.util import find_spec
from typing import Protocol

from cua_rl.devices.pool import DeviceBackend
from cua_rl.errors import ConfigError
from cua_rl.tasks.demo.expert import DemoExperts
from cua_rl.tasks.demo.phone import SimulatedPhones
from cua_rl.tasks.django_admin.device import AdminPages
from cua_rl.tasks.django_admin.expert import AdminExperts
from cua_rl.tasks.expert import Experts
from cua_rl.tasks.miniwob.device import MiniWobPages
from cua_rl.tasks.miniwob.expert import MiniWobExperts
from cua_rl.tasks.page_tasks import UserPages
from cua_rl.tasks.source_config import TaskSources, find_site, parse_sources


class DeviceSettings(Protocol):
    """The part of a recipe's configuration that is about devices."""

    @property
    def device(self) -> str: ...
    @property
    def screen_scale(self) -> int: ...
    @property
    def browser_scale(self) -> float | None: ...
    @property
    def tasks(self) -> TaskSources: ...


def make_backend(settings: DeviceSettings) -> DeviceBackend:
    """The configured backend, not yet entered; raises `ConfigError` for what can never work.

    Tasks of a web site bring their device, a browser; desktop tasks bring a Linux desktop.
    """
    match find_site(settings.tasks):
        case "desktop":
            return _make_desktops()
        case "miniwob":
            return MiniWobPages(scale=settings.browser_scale)
        case "django_admin":
            return AdminPages(scale=settings.browser_scale)
        case "page":
            return UserPages(parse_sources(settings.tasks), scale=settings.browser_scale)
        case _:
            _refuse_browser_scale(settings)
            return SimulatedPhones(scale=settings.screen_scale)


def _make_desktops() -> DeviceBackend:
    if find_spec("Xlib") is None or find_spec("mss") is None:
        raise ConfigError(
            "tasks: expected the packages python-xlib and mss for Linux desktops, got none; install them: pip install "
            "'cua_rl[desktop]'"
        )
    from cua_rl.tasks.desktop.desktops import LinuxDesktops

    return LinuxDesktops()


def make_experts(settings: DeviceSettings) -> Experts:
    """The scripted experts for tasks on those devices."""
    match find_site(settings.tasks):
        case "miniwob":
            return MiniWobExperts()
        case "django_admin":
            return AdminExperts()
        case _:
            return DemoExperts()


def _refuse_browser_scale(settings: DeviceSettings) -> None:
    if settings.browser_scale is not None:
        raise ConfigError(
            f"browser_scale: expected it only with tasks on web pages, got {settings.browser_scale!r}; leave it out"
        )
