"""The whole state of the phone as an immutable tree, which `asdict` makes plain JSON."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from cua_rl.environments.phone.simulator.catalog import HOME_PACKAGE, Toggle, find_app

Shade = Literal["notifications", "quick_settings"]
SystemCommand = Literal[
    "toggle",
    "toggle_tile",
    "play_track",
    "switch_alarm",
    "choose_screen_timeout",
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
    """A Wi-Fi network in range; an empty `password` means that it is open."""

    name: str
    is_saved: bool = False
    password: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledApp:
    """An installed app and its storage use in megabytes."""

    app: str
    size_mb: int
    cache_mb: int
    is_running: bool = False
    may_notify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A notification in the shade."""

    app: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemState:
    """State of the system pages other than toggles and levels."""

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
    """Toggles that were changed in the shade, sorted."""

    def find_network(self, name: str) -> Network:
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
        others = {*self.switched_on} - {name}
        return replace(self, switched_on=tuple(sorted(others | {name} if is_on else others)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Somebody in the address book."""

    name: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFolder:
    """A folder of apps on a home page."""

    name: str
    apps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppData:
    """App data not stored in `PhoneState` itself."""

    contacts: tuple[Contact, ...] = ()
    """Sorted by name."""
    alarms: tuple[str, ...] = ()
    """Times such as "06:45", in the order in which they were set."""
    timer_s: int = 0
    """Duration the timer was started with; 0 if it is not running."""
    tracks: tuple[tuple[str, str], ...] = ()
    """(title, artist)."""
    created_files: tuple[str, ...] = ()
    """Paths relative to the storage root, in addition to the seed's; folders end with a slash."""
    deleted_files: tuple[str, ...] = ()
    screenshots: tuple[str, ...] = ()
    """Name of the screen that each screenshot shows."""
    home_folders: tuple[HomeFolder, ...] = ()
    """Folders on the home pages."""

    def number_of(self, name: str) -> str | None:
        return next((contact.number for contact in self.contacts if contact.name == name), None)

    def name_of(self, number: str) -> str | None:
        """The contact with a phone number; spaces do not matter."""
        plain = number.replace(" ", "")
        return next((contact.name for contact in self.contacts if contact.number.replace(" ", "") == plain), None)


Field = Literal[
    "note",
    "message",
    "address",
    "name",
    "number",
    "search",
    "folder",
    "hour",
    "minute",
    "minutes",
    "drawer",
    "password",
]
KeyboardLayer = Literal["lower", "upper", "symbols"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IconPlace:
    """Position of an icon on its home page: top left corner in logical units."""

    app: str
    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text message; `is_mine` if the phone's owner sent it."""

    text: str
    is_mine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The text messages exchanged with one person."""

    contact: str
    texts: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhoneState:
    """The phone's complete state: it determines everything the phone shows and does."""

    seed: int
    home_pages: tuple[tuple[IconPlace, ...], ...]
    """Icons in reading order, one tuple per page."""
    setting_rows: tuple[str, ...]
    """Rows of the Settings app, from the top."""
    wallpaper: int
    minute_of_day: int
    battery_pct: int
    enabled: tuple[Toggle, ...] = ()
    """The toggles that are on, sorted."""
    brightness_level: int = 128
    """1-255."""
    screen_timeout_ms: int = 60_000
    media_volume: int = 7
    """0-15."""
    notes: tuple[str, ...] = ()
    threads: tuple[Thread, ...] = ()
    num_photos: int = 6
    track: int | None = None
    """Index of the track that plays."""
    dialled: str = ""
    calls: tuple[str, ...] = ()
    """Numbers that were called, last one last."""
    calculation: str = ""
    alarms_on: tuple[int, ...] = (0,)
    system: SystemState = field(default_factory=SystemState)
    apps: AppData = field(default_factory=AppData)

    app: str | None = None
    """None is the home screen."""
    subscreens: tuple[str, ...] = ()
    """Screens opened inside the app, the current one last."""
    home_page: int = 0
    scroll: int = 0
    """How far the current list is scrolled down, logical units."""
    recent_apps: tuple[str, ...] = ()
    """Most recent first."""
    is_recents_open: bool = False
    shade: Shade | None = None
    """The part of the notification shade that is open."""
    is_screen_on: bool = True
    is_volume_shown: bool = False
    focus: Field | None = None
    draft: str = ""
    """Text in the current screen's text field."""
    draft_field: Field | None = None
    """The field that `draft` belongs to, on screens with several."""
    form: tuple[tuple[Field, str], ...] = ()
    """Text in the screen's other fields."""
    keyboard: KeyboardLayer = "lower"

    @property
    def screen(self) -> str:
        """The current screen's name: "home", "recents", an app such as "settings", or "settings/display"."""
        if not self.is_screen_on:
            return "off"
        if self.shade is not None:
            return self.shade
        if self.is_recents_open:
            return "recents"
        return "/".join(("home" if self.app is None else self.app, *self.subscreens[-1:]))

    @property
    def package(self) -> str:
        """The package name of the app in the foreground."""
        return HOME_PACKAGE if self.app is None else find_app(self.app).package

    @property
    def clock(self) -> str:
        """The time of day, such as "09:05"."""
        return f"{self.minute_of_day // 60:02d}:{self.minute_of_day % 60:02d}"

    @property
    def typed(self) -> dict[Field, str]:
        """Text in the fields of the current screen."""
        texts = dict(self.form)
        if self.draft_field is not None:
            texts[self.draft_field] = self.draft
        return texts

    def is_on(self, toggle: Toggle) -> bool:
        return toggle in self.enabled

    def with_toggle(self, toggle: Toggle, is_on: bool) -> Self:
        others = {other for other in self.enabled if other != toggle}
        return replace(self, enabled=tuple(sorted(others | {toggle} if is_on else others)))
