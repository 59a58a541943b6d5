"""The fixed vocabulary of the system pages: extra rows of Settings, apps from the store, networks, languages."""

from dataclasses import dataclass

from cua_rl.devices.simulator.catalog import APPS, AppSpec, Colour, Toggle


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRow:
    """A row of Settings that only phones with system pages have; it opens the page `subscreen`."""

    title: str
    label: str
    subscreen: str
    glyph: str
    paper: Colour
    replaces: str = ""
    """The plain row whose place it takes; "" for a row that is inserted."""


EXTRA_ROWS: dict[str, ExtraRow] = {
    "wifi_page": ExtraRow(
        title="Wi-Fi", label="Wi-Fi", subscreen="wifi", glyph="wifi", paper="#2f6fed", replaces="wifi"
    ),
    "bluetooth_page": ExtraRow(
        title="Bluetooth",
        label="Bluetooth",
        subscreen="bluetooth",
        glyph="bluetooth",
        paper="#26348f",
        replaces="bluetooth",
    ),
    "apps": ExtraRow(title="Apps", label="Apps", subscreen="apps", glyph="apps", paper="#2e9e4f"),
    "storage": ExtraRow(title="Storage", label="Storage", subscreen="storage", glyph="storage", paper="#6a3fd1"),
    "security": ExtraRow(title="Security", label="Security", subscreen="security", glyph="lock", paper="#00796b"),
    "wallpaper": ExtraRow(
        title="Wallpaper", label="Wallpaper", subscreen="wallpaper", glyph="gallery", paper="#c2185b"
    ),
    "language": ExtraRow(
        title="Language and input", label="Language", subscreen="language", glyph="globe", paper="#16b5cf"
    ),
    "developer": ExtraRow(
        title="Developer options", label="Developer", subscreen="developer", glyph="braces", paper="#45456a"
    ),
}
ALL_EXTRA_ROWS: tuple[str, ...] = tuple(EXTRA_ROWS)

QUICK_TILES: dict[Toggle, str] = {
    Toggle.WIFI: "Wi-Fi",
    Toggle.BLUETOOTH: "Bluetooth",
    Toggle.AIRPLANE_MODE: "Airplane",
    Toggle.DO_NOT_DISTURB: "Disturb",
    Toggle.AUTO_ROTATE: "Rotate",
    Toggle.BATTERY_SAVER: "Saver",
}
"""The tiles of the quick settings and what stands on them."""

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
"""What system pages switch, beside the toggles, and what stands on the rows."""


def find_app(app: str) -> AppSpec:
    """The app of this name, whether it belongs to the system or came from the store."""
    return APPS.get(app) or STORE_APPS[app]


def glyph_of(app: str) -> str:
    """The name of the line art on the app's icon."""
    return STORE_GLYPHS.get(app, app)
