"""From what the user asked for to where devices come from."""

from typing import Protocol

from cua_rl.devices.pool import DeviceBackend
from cua_rl.tasks.demo.phone import SimulatedPhones


class DeviceSettings(Protocol):
    """The part of a recipe's configuration that is about devices."""

    @property
    def device(self) -> str: ...
    @property
    def screen_scale(self) -> int: ...


def make_backend(settings: DeviceSettings) -> DeviceBackend:
    """The configured backend, not yet entered; raises `ConfigError` for what can never work."""
    return SimulatedPhones(scale=settings.screen_scale)
