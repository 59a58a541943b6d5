"""The values that a simulated phone's queries can ever have, whatever the agent does, and what they presuppose."""

from collections.abc import Callable, Mapping
from typing import get_args

from cua_rl.environments.phone.simulator import catalog
from cua_rl.environments.phone.simulator.queries import LOOKUPS, QUERIES
from cua_rl.environments.phone.simulator.state import Field, PhoneState, Shade
from cua_rl.environments.query_values import PACKAGE, PHONE_QUERIES

Choices = Mapping[str, str]
"""Values, and what people may call them."""

SIMULATOR_QUERIES = {name: PHONE_QUERIES[name] for name in (*QUERIES, *LOOKUPS)}

PACKAGES: Choices = {
    spec.package: f"{spec.app} {spec.label}" for spec in (*catalog.APPS.values(), *catalog.STORE_APPS.values())
}
"""Every app that a phone can have."""

_MAX_TIMER_MIN = 600
_SCREENS = ("off", "home", "recents", *get_args(Shade))
_PAGES_WITHOUT_ROW = ("display", "sound", "date", "about", "time_zone", "screen_lock", "languages")
_SETTINGS_PAGES = {"app", "app_storage", "network", "set_wallpaper", "ask", *_PAGES_WITHOUT_ROW, *(
    row.subscreen for row in catalog.EXTRA_ROWS.values()
)}  # fmt: skip


def _named(*names: str) -> Choices:
    return dict.fromkeys(names, "")


def _levels(low: int, high: int) -> Choices:
    labels = {high: "maximum full highest", low: "minimum lowest"}
    return {str(level): labels.get(level, "") for level in range(low, high + 1)}


def _installed(state: PhoneState) -> Choices:
    return {
        package: PACKAGES[package] for package in (catalog.find_app(entry.app).package for entry in state.system.apps)
    }


def _network_names(state: PhoneState) -> Choices:
    return _named(*(network.name for network in state.system.networks))


def _screens(state: PhoneState) -> Choices:
    pages = [f"settings/{page}" for page in sorted(_SETTINGS_PAGES)]
    return _named(*_SCREENS, *(entry.app for entry in state.system.apps), *pages)


CHOICES: Mapping[str, Callable[[PhoneState], Choices]] = {
    "current_app": lambda state: {catalog.HOME_PACKAGE: "home launcher", **_installed(state)},
    "recent_apps": _installed,
    "installed_apps": _installed,
    "current_screen": _screens,
    "shade": lambda state: _named("", *get_args(Shade)),
    "focused_field": lambda state: _named("", *get_args(Field)),
    "home_page": lambda state: _levels(0, len(state.home_pages)),
    "brightness_level": lambda state: _levels(catalog.MIN_BRIGHTNESS, catalog.MAX_BRIGHTNESS),
    "media_volume": lambda state: {**_levels(0, catalog.MAX_VOLUME), "0": "minimum lowest mute muted silent"},
    "screen_timeout": lambda state: {str(ms): label for ms, label in catalog.SCREEN_TIMEOUTS_MS.items()},
    # nothing that an agent can do charges the phone
    "battery_level": lambda state: _named(str(state.battery_pct)),
    "timer_s": lambda state: {str(60 * n): f"{n} min {n} minutes" for n in range(_MAX_TIMER_MIN + 1)},
    "system_language": lambda state: catalog.LANGUAGES,
    "screen_lock": lambda state: _named(*catalog.SCREEN_LOCKS),
    "time_zone": lambda state: _named(*catalog.TIME_ZONES),
    "wallpaper": lambda state: _named(*catalog.WALLPAPER_NAMES),
    "connected_wifi": lambda state: _named("", *_network_names(state)),
    "saved_wifi": _network_names,
    "playing_track": lambda state: _named("", *map(str, range(len(state.apps.tracks)))),
    "playing_title": lambda state: _named("", *(title for title, _ in state.apps.tracks)),
}
"""What a phone can answer; queries that are not here can answer everything of their kind."""

ARGUMENTS: Mapping[str, Callable[[PhoneState], Choices]] = {
    **{name: _installed for name, query in SIMULATOR_QUERIES.items() if query.argument is PACKAGE},
    "quick_tile": lambda state: {tile.value: label for tile, label in catalog.QUICK_TILES.items()},
    "wifi_saved": _network_names,
}
"""What may follow a query's colon on a phone."""

NEEDED_ROWS: Mapping[str, str] = {
    "system_language": "language",
    "screen_lock": "security",
    "usb_debugging": "developer",
    "saved_wifi": "wifi_page",
    "wifi_saved": "wifi_page",
    "cache_cleared": "apps",
    "chrome_cache_cleared": "apps",
    "app_notifications": "apps",
    "app_storage_mb": "apps",
}
"""The row of Settings (`SystemStart.extra_rows`) without whose page nothing changes, or shows, what a query reads."""


def listed_part(query: str, value: str) -> str:
    """The part of a value that `CHOICES` lists: screens without what they are about, and apps for their own screens."""
    if query != "current_screen":
        return value
    return value.partition(":")[0] if value.startswith("settings/") else value.partition("/")[0]
