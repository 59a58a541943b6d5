"""Constants of the simulated phone: apps, settings, networks, languages, colours."""

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
    """An app's names and the colours of its icon."""

    app: str
    label: str
    package: str
    paper: Colour
    ink: Colour = "#ffffff"


APPS: dict[str, AppSpec] = {
    app: AppSpec(app=app, label=app.capitalize(), package=f"com.android.{package}", paper=paper, ink=ink)
    for app, package, paper, ink in (
        ("settings", "settings", "#5f6b7a", "#ffffff"),
        ("phone", "dialer", "#2e9e4f", "#ffffff"),
        ("messages", "messaging", "#2f6fed", "#ffffff"),
        ("mail", "email", "#d32f2f", "#ffffff"),
        ("notes", "notes", "#f7c927", "#4a3b00"),
        ("clock", "deskclock", "#f4f6f8", "#1d2433"),
        ("camera", "camera2", "#33353d", "#ffffff"),
        ("gallery", "gallery3d", "#e0479e", "#ffffff"),
        ("calendar", "calendar", "#ffffff", "#d32f2f"),
        ("maps", "maps", "#b9e6a3", "#c62828"),
        ("music", "music", "#f4721e", "#ffffff"),
        ("files", "documentsui", "#8a6a4a", "#ffffff"),
        ("chrome", "chrome", "#16b5cf", "#ffffff"),
        ("calculator", "calculator2", "#6a3fd1", "#ffffff"),
        ("weather", "weather", "#9ad4f7", "#f59f00"),
        ("contacts", "contacts", "#00796b", "#ffffff"),
    )
}


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
class SettingsRow:
    """A row of the Settings app: a toggle, or (`toggle` is None) the page `subscreen` that opens."""

    title: str
    label: str
    """One word, which also occurs in the title."""
    subscreen: str
    glyph: str
    paper: Colour
    toggle: Toggle | None = None
    replaces: str = ""
    """The plain row whose place it takes; "" for any other."""


SETTINGS: dict[str, SettingsRow] = {
    name: SettingsRow(title=title, label=label, subscreen=name, glyph=name, paper=paper, toggle=toggle)
    for name, title, label, paper, toggle in (
        ("wifi", "Wi-Fi", "Wi-Fi", "#2f6fed", Toggle.WIFI),
        ("bluetooth", "Bluetooth", "Bluetooth", "#26348f", Toggle.BLUETOOTH),
        ("airplane_mode", "Airplane mode", "Airplane", "#f4721e", Toggle.AIRPLANE_MODE),
        ("dark_theme", "Dark theme", "Dark", "#45456a", Toggle.DARK_THEME),
        ("battery_saver", "Battery saver", "Battery", "#2e9e4f", Toggle.BATTERY_SAVER),
        ("location", "Location", "Location", "#d32f2f", Toggle.LOCATION),
        ("do_not_disturb", "Do not disturb", "Disturb", "#8e24aa", Toggle.DO_NOT_DISTURB),
        ("auto_rotate", "Auto-rotate", "Auto-rotate", "#00a08a", Toggle.AUTO_ROTATE),
        ("display", "Display", "Display", "#f2b705", None),
        ("sound", "Sound", "Sound", "#e0479e", None),
        ("date", "Date and time", "Date", "#8a6a4a", None),
        ("about", "About phone", "About", "#5f6b7a", None),
    )
}

NUM_ROWS_VISIBLE = 7
"""Rows of Settings that show without scrolling."""
NUM_ICONS_PER_PAGE = 8
ICON_SIZE = 34

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


EXTRA_ROWS: dict[str, SettingsRow] = {
    name: SettingsRow(title=title, label=label, subscreen=subscreen, glyph=glyph, paper=paper, replaces=replaces)
    for name, title, label, subscreen, glyph, paper, replaces in (
        ("wifi_page", "Wi-Fi", "Wi-Fi", "wifi", "wifi", "#2f6fed", "wifi"),
        ("bluetooth_page", "Bluetooth", "Bluetooth", "bluetooth", "bluetooth", "#26348f", "bluetooth"),
        ("apps", "Apps", "Apps", "apps", "apps", "#2e9e4f", ""),
        ("storage", "Storage", "Storage", "storage", "storage", "#6a3fd1", ""),
        ("security", "Security", "Security", "security", "lock", "#00796b", ""),
        ("wallpaper", "Wallpaper", "Wallpaper", "wallpaper", "gallery", "#c2185b", ""),
        ("language", "Language and input", "Language", "language", "globe", "#16b5cf", ""),
        ("developer", "Developer options", "Developer", "developer", "braces", "#45456a", ""),
    )
}
"""Rows that only phones with system pages have."""
ALL_EXTRA_ROWS: tuple[str, ...] = tuple(EXTRA_ROWS)

QUICK_TILES: dict[Toggle, str] = {
    Toggle.WIFI: "Wi-Fi",
    Toggle.BLUETOOTH: "Bluetooth",
    Toggle.AIRPLANE_MODE: "Airplane",
    Toggle.DO_NOT_DISTURB: "Disturb",
    Toggle.AUTO_ROTATE: "Rotate",
    Toggle.BATTERY_SAVER: "Saver",
}
"""Quick-settings tiles and their labels."""

STORE_APPS: dict[str, AppSpec] = {
    app: AppSpec(app=app, label=label, package=package, paper=paper)
    for app, label, package, paper in (
        ("instagram", "Instagram", "com.instagram.android", "#c13584"),
        ("facebook", "Facebook", "com.facebook.katana", "#1877f2"),
        ("podcasts", "Podcasts", "com.example.podcasts", "#7b1fa2"),
        ("fitness", "Fitness", "com.example.fitness", "#2e7d32"),
        ("recipes", "Recipes", "com.example.recipes", "#ef6c00"),
        ("scanner", "Scanner", "com.example.scanner", "#455a64"),
        ("trains", "Trains", "com.example.trains", "#c62828"),
        ("radio", "Radio", "com.example.radio", "#0277bd"),
    )
}
"""Apps that can be uninstalled; those in `APPS` belong to the system."""

STORE_GLYPHS: dict[str, str] = {
    "instagram": "camera",
    "facebook": "person",
    "podcasts": "sound",
    "fitness": "sun_rays",
    "recipes": "notes",
    "scanner": "files",
    "trains": "rails",
    "radio": "music",
}

NETWORKS = (
    "Alder", "Birch", "Cedar", "Cafe Nord", "Dahlia", "Elm House", "Fern", "Garden", "Harbour", "Iris", "Juniper",
    "Kiosk", "Lilac", "Maple",
)  # fmt: skip
BLUETOOTH_DEVICES = ("Headphones", "Speaker", "Watch", "Car", "Keyboard", "Scale")

LANGUAGES: dict[str, str] = {
    "English": "English",
    "Dansk": "Danish",
    "Deutsch": "German",
    "Hrvatski": "Croatian",
    "Italiano": "Italian",
    "Magyar": "Hungarian",
    "Nederlands": "Dutch",
    "Norsk": "Norwegian",
    "Polski": "Polish",
    "Suomi": "Finnish",
    "Svenska": "Swedish",
}
"""Each language's own name, in letters that the phone's font has, and its English one."""

SCREEN_LOCKS = ("None", "Swipe", "Pattern", "PIN", "Password")
TIME_ZONES: dict[str, int] = {
    "Los Angeles": -8,
    "New York": -5,
    "London": 0,
    "Berlin": 1,
    "Mumbai": 5,
    "Tokyo": 9,
}
"""Hours from Greenwich, whole ones."""
WALLPAPER_NAMES = ("Blue", "Purple", "Teal", "Brown", "Grey", "Rose")
"""One for each of `WALLPAPERS`."""

SWITCHES: dict[str, str] = {
    "developer_options": "Developer options",
    "usb_debugging": "USB debugging",
    "stay_awake": "Stay awake",
    "show_taps": "Show taps",
    "call_vibration": "Vibrate for calls",
    "touch_vibration": "Vibrate on touch",
    "spell_checker": "Spell checker",
    "lock_notifications": "Show on lock screen",
}
"""Switches on system pages other than toggles, with the text of their rows."""


def find_app(app: str) -> AppSpec:
    """The app of this name, whether it belongs to the system or came from the store."""
    return APPS.get(app) or STORE_APPS[app]


def glyph_of(app: str) -> str:
    """The name of the line art on the app's icon."""
    return STORE_GLYPHS.get(app, app)
