"""Reading the system part of the phone's state by name; names with an argument are written "name:argument"."""

import json
from collections.abc import Callable

from cua_rl.devices.simulator.catalog import MAX_BRIGHTNESS, MAX_VOLUME, Toggle
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import WALLPAPER_NAMES, find_app
from cua_rl.devices.simulator.system_state import InstalledApp

_BRIGHTNESS_TOLERANCE = 5
"""Percentage points."""


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _switch(name: str) -> Callable[[PhoneState], str]:
    return lambda state: _truth(name in state.system.switched_on)


def _connected_wifi(state: PhoneState) -> str:
    return state.system.connected_network if state.is_on(Toggle.WIFI) else ""


SYSTEM_QUERIES: dict[str, Callable[[PhoneState], str]] = {
    "shade": lambda state: state.shade or "",
    "connected_wifi": _connected_wifi,
    "saved_wifi": lambda state: json.dumps([n.name for n in state.system.networks if n.is_saved]),
    "notification_count": lambda state: str(len(state.system.shown_notifications())),
    "system_language": lambda state: state.system.language,
    "screen_lock": lambda state: state.system.screen_lock,
    "time_zone": lambda state: state.system.time_zone,
    "wallpaper": lambda state: WALLPAPER_NAMES[state.wallpaper],
    "usb_debugging": _switch("usb_debugging"),
    "call_vibration": _switch("call_vibration"),
    "installed_apps": lambda state: json.dumps([find_app(entry.app).package for entry in state.system.apps]),
    "chrome_cache_cleared": lambda state: _cache_cleared(state, "com.android.chrome"),
}


def _find(state: PhoneState, package: str) -> InstalledApp | None:
    return next((entry for entry in state.system.apps if find_app(entry.app).package == package), None)


def _app_storage_mb(state: PhoneState, package: str) -> str:
    entry = _find(state, package)
    return "" if entry is None else str(entry.size_mb + entry.cache_mb)


def _app_running(state: PhoneState, package: str) -> str:
    entry = _find(state, package)
    return _truth(entry is not None and entry.is_running)


def _cache_cleared(state: PhoneState, package: str) -> str:
    entry = _find(state, package)
    return _truth(entry is not None and entry.cache_mb == 0)


def _app_notifications(state: PhoneState, package: str) -> str:
    entry = _find(state, package)
    return _truth(entry is not None and entry.may_notify)


def _tile(state: PhoneState, toggle: str) -> str:
    return _truth(state.is_on(Toggle(toggle))) if toggle in state.system.tiles_used else "untouched"


def _brightness_is_about(state: PhoneState, percent: str) -> str:
    actual = 100 * state.brightness_level / MAX_BRIGHTNESS
    return _truth(abs(actual - int(percent)) <= _BRIGHTNESS_TOLERANCE)


def _media_volume_is_about(state: PhoneState, percent: str) -> str:
    return _truth(abs(state.media_volume - MAX_VOLUME * int(percent) / 100) <= 1)


SYSTEM_LOOKUPS: dict[str, Callable[[PhoneState, str], str]] = {
    "app_installed": lambda state, package: _truth(_find(state, package) is not None),
    "app_running": _app_running,
    "app_storage_mb": _app_storage_mb,
    "app_notifications": _app_notifications,
    "cache_cleared": _cache_cleared,
    "wifi_saved": lambda state, name: _truth(any(n.is_saved and n.name == name for n in state.system.networks)),
    "quick_tile": _tile,
    "brightness_is_about": _brightness_is_about,
    "media_volume_is_about": _media_volume_is_about,
}
"""What is asked with an argument, such as "app_installed:com.instagram.android"."""
