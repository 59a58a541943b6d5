"""The part of the phone's state that its system pages show: networks, apps, notifications, language, switches."""

from dataclasses import dataclass, replace
from typing import Literal, Self

Shade = Literal["notifications", "quick_settings"]
SystemCommand = Literal[
    "switch",
    "allow_usb_debugging",
    "choose_language",
    "choose_screen_lock",
    "choose_time_zone",
    "set_wallpaper",
    "clear_notifications",
    "connect",
    "disconnect",
    "forget",
    "join",
    "force_stop",
    "clear_cache",
    "uninstall",
    "switch_notifications",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A Wi-Fi network within reach; a `password` of "" is an open one."""

    name: str
    is_saved: bool = False
    password: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledApp:
    """An app and what it takes up, in megabytes."""

    app: str
    size_mb: int
    cache_mb: int
    is_running: bool = False
    may_notify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What an app reports in the notification shade."""

    app: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemState:
    """Everything on the system pages that is no toggle and no level."""

    networks: tuple[Network, ...] = ()
    connected_network: str = ""
    """The saved network in use while Wi-Fi is on; "" is none."""
    bluetooth_devices: tuple[str, ...] = ()
    notifications: tuple[Notification, ...] = ()
    apps: tuple[InstalledApp, ...] = ()
    """Sorted by label."""
    language: str = "English"
    screen_lock: str = "Swipe"
    time_zone: str = "London"
    switched_on: tuple[str, ...] = ()
    """Names of `SWITCHES`, sorted."""
    tiles_used: tuple[str, ...] = ()
    """Toggles that were flipped in the shade, sorted."""

    def find_network(self, name: str) -> Network:
        """The network of this name."""
        return next(network for network in self.networks if network.name == name)

    def find_app(self, app: str) -> InstalledApp | None:
        """The installed app, or None if it is not installed."""
        return next((entry for entry in self.apps if entry.app == app), None)

    def shown_notifications(self) -> tuple[Notification, ...]:
        """The notifications of apps that may notify, newest first."""
        silent = {entry.app for entry in self.apps if not entry.may_notify}
        return tuple(notification for notification in self.notifications if notification.app not in silent)

    def with_network(self, network: Network) -> Self:
        """The state with the network of the same name replaced."""
        return replace(self, networks=tuple(network if n.name == network.name else n for n in self.networks))

    def with_app(self, entry: InstalledApp) -> Self:
        """The state with the installed app of the same name replaced."""
        return replace(self, apps=tuple(entry if other.app == entry.app else other for other in self.apps))

    def with_running(self, app: str) -> Self:
        """The state after an app was started."""
        entry = self.find_app(app)
        return self if entry is None else self.with_app(replace(entry, is_running=True))

    def with_switch(self, name: str, is_on: bool) -> Self:
        """The state with one switch set."""
        others = {*self.switched_on} - {name}
        return replace(self, switched_on=tuple(sorted(others | {name} if is_on else others)))
