"""The fixed vocabulary of the phone: apps, settings, colours. The rest of a phone comes from its seed."""

from dataclasses import dataclass, replace
from enum import StrEnum

Colour = str
"""A CSS hex colour, such as "#2f80ed"."""

WIDTH = 192
"""Logical units; pixels are units times the phone's scale."""
HEIGHT = 320

HOME_PACKAGE = "com.android.launcher3"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSpec:
    """An installed app: how it is called and how its icon looks."""

    app: str
    label: str
    package: str
    paper: Colour
    ink: Colour = "#ffffff"


def _app(app: str, package: str, paper: Colour, ink: Colour = "#ffffff") -> AppSpec:
    return AppSpec(app=app, label=app.capitalize(), package=f"com.android.{package}", paper=paper, ink=ink)


_APPS = (
    _app("settings", "settings", "#5f6b7a"),
    _app("phone", "dialer", "#2e9e4f"),
    _app("messages", "messaging", "#2f6fed"),
    _app("mail", "email", "#d32f2f"),
    _app("notes", "notes", "#f7c927", "#4a3b00"),
    _app("clock", "deskclock", "#f4f6f8", "#1d2433"),
    _app("camera", "camera2", "#33353d"),
    _app("gallery", "gallery3d", "#e0479e"),
    _app("calendar", "calendar", "#ffffff", "#d32f2f"),
    _app("maps", "maps", "#b9e6a3", "#c62828"),
    _app("music", "music", "#f4721e"),
    _app("files", "documentsui", "#8a6a4a"),
    _app("chrome", "chrome", "#16b5cf"),
    _app("calculator", "calculator2", "#6a3fd1"),
    _app("weather", "weather", "#9ad4f7", "#f59f00"),
    _app("contacts", "contacts", "#00796b"),
)
APPS: dict[str, AppSpec] = {spec.app: spec for spec in _APPS}


class Toggle(StrEnum):
    """Everything on the phone that is either on or off."""

    WIFI = "wifi"
    BLUETOOTH = "bluetooth"
    AIRPLANE_MODE = "airplane_mode"
    DARK_THEME = "dark_theme"
    BATTERY_SAVER = "battery_saver"
    LOCATION = "location"
    DO_NOT_DISTURB = "do_not_disturb"
    AUTO_ROTATE = "auto_rotate"
    AUTO_TIME = "auto_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """A row of the Settings app: a toggle, or a page (`toggle` is None) that opens."""

    row: str
    title: str
    label: str
    """One word, which also occurs in the title."""
    paper: Colour
    toggle: Toggle | None = None


def _toggle(toggle: Toggle, title: str, label: str, paper: Colour) -> SettingSpec:
    return SettingSpec(row=toggle.value, title=title, label=label, paper=paper, toggle=toggle)


def _page(row: str, title: str, label: str, paper: Colour) -> SettingSpec:
    return SettingSpec(row=row, title=title, label=label, paper=paper)


_SETTINGS = (
    _toggle(Toggle.WIFI, "Wi-Fi", "Wi-Fi", "#2f6fed"),
    _toggle(Toggle.BLUETOOTH, "Bluetooth", "Bluetooth", "#26348f"),
    _toggle(Toggle.AIRPLANE_MODE, "Airplane mode", "Airplane", "#f4721e"),
    _toggle(Toggle.DARK_THEME, "Dark theme", "Dark", "#45456a"),
    _toggle(Toggle.BATTERY_SAVER, "Battery saver", "Battery", "#2e9e4f"),
    _toggle(Toggle.LOCATION, "Location", "Location", "#d32f2f"),
    _toggle(Toggle.DO_NOT_DISTURB, "Do not disturb", "Disturb", "#8e24aa"),
    _toggle(Toggle.AUTO_ROTATE, "Auto-rotate", "Auto-rotate", "#00a08a"),
    _page("display", "Display", "Display", "#f2b705"),
    _page("sound", "Sound", "Sound", "#e0479e"),
    _page("date", "Date and time", "Date", "#8a6a4a"),
    _page("about", "About phone", "About", "#5f6b7a"),
)
SETTINGS: dict[str, SettingSpec] = {spec.row: spec for spec in _SETTINGS}

NUM_ROWS_VISIBLE = 7
"""Rows of Settings that show without scrolling."""
NUM_ICONS_PER_PAGE = 8

SCREEN_TIMEOUTS_MS: dict[int, str] = {
    15_000: "15 seconds",
    30_000: "30 seconds",
    60_000: "1 minute",
    120_000: "2 minutes",
    300_000: "5 minutes",
    600_000: "10 minutes",
}
MIN_BRIGHTNESS, MAX_BRIGHTNESS = 1, 255
MAX_VOLUME = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """The colours of everything but icons."""

    background: Colour
    surface: Colour
    text: Colour
    muted: Colour
    divider: Colour
    accent: Colour
    on_accent: Colour
    track: Colour
    """An off toggle, the empty part of a slider."""

    @classmethod
    def on_wallpaper(cls) -> "Palette":
        """White, for what lies on the wallpaper."""
        return replace(DARK, text="#ffffff", background="#2a2d38")


LIGHT = Palette(
    background="#f3f4f7",
    surface="#ffffff",
    text="#1a1c20",
    muted="#6a7079",
    divider="#e1e4ea",
    accent="#1f6fe5",
    on_accent="#ffffff",
    track="#b9bfc9",
)
DARK = Palette(
    background="#121317",
    surface="#1f2127",
    text="#f0f1f4",
    muted="#a0a6b1",
    divider="#30333b",
    accent="#79aefc",
    on_accent="#0c1a33",
    track="#565b66",
)

WALLPAPERS: tuple[tuple[Colour, Colour], ...] = (
    ("#3d4f7c", "#1c2440"),
    ("#6b4a7e", "#2a1c3d"),
    ("#3f6b68", "#172f33"),
    ("#7a5548", "#33211d"),
    ("#4b5563", "#1f2530"),
    ("#8a4f63", "#381d2b"),
)
"""Top and bottom colour; dark enough for white labels."""
