"""Linux desktops as an environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from cua_rl.environments.contract import DESKTOP_SCREEN, DeviceOrder, Environment, Loading, Source
from cua_rl.environments.pool import DeviceBackend
from cua_rl.tasks.task import Template
from cua_rl.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopSource(Source):
    """The tasks of this package; they and the desktops need packages of their own, so they are imported on use."""

    source_types = ("desktop",)

    def load(self, loading: Loading) -> Sequence[Template]:
        from cua_rl.environments.desktop.templates import DESKTOP_TASKS

        return DESKTOP_TASKS


def _make_backend(order: DeviceOrder) -> DeviceBackend:
    if find_spec("Xlib") is None or find_spec("mss") is None:
        raise ConfigError(
            "tasks: expected the packages python-xlib and mss for Linux desktops, got none; install them: pip install "
            "'cua_rl[desktop]'"
        )
    from cua_rl.environments.desktop.desktops import LinuxDesktops

    return LinuxDesktops()


DESKTOP = Environment(
    name="desktop", sources=(DesktopSource,), make_backend=_make_backend, smallest_screen=lambda order: DESKTOP_SCREEN
)
