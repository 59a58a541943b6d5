"""Reading the phone's state by name, for validators and experts; agents never see it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches

from cua_rl.environments.phone.simulator.apps.browser import SEARCH
from cua_rl.environments.phone.simulator.apps.files import exists_on_device
from cua_rl.environments.phone.simulator.apps.messages import conversation_with
from cua_rl.environments.phone.simulator.catalog import MAX_BRIGHTNESS, MAX_VOLUME, WALLPAPER_NAMES, Toggle, find_app
from cua_rl.environments.phone.simulator.launcher.icons import apps_in_folder, page_of
from cua_rl.environments.phone.simulator.navigation import subject
from cua_rl.environments.phone.simulator.state import InstalledApp, PhoneState
from cua_rl.types.errors import TaskError

_BRIGHTNESS_TOLERANCE = 5
"""Percentage points."""


def read_query(state: PhoneState, name: str) -> str:
    """The named piece of state as text; raises `TaskError` for a name the phone does not know."""
    lookup, colon, argument = name.partition(":")
    if colon and lookup in LOOKUPS:
        return LOOKUPS[lookup](state, argument)
    read = QUERIES.get(name)
    if read is None:
        near = get_close_matches(name, QUERIES, n=3)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of {', '.join(sorted(QUERIES))}"
        )
        raise TaskError(f"expected the name of a query that the simulated phone knows, got {name!r}; {hint}")
    return read(state)


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _json(value: Sequence[object]) -> str:
    return json.dumps(list(value))


def _digits(text: str) -> str:
    return "".join(char for char in text if char.isdecimal() or char in "*#+")


def _toggle(toggle: Toggle) -> Callable[[PhoneState], str]:
    return lambda state: _truth(state.is_on(toggle))


def _switch(name: str) -> Callable[[PhoneState], str]:
    return lambda state: _truth(name in state.system.switched_on)


def _current_url(state: PhoneState) -> str:
    return state.subscreens[-1] if state.app == "chrome" and state.subscreens else ""


TOGGLE_QUERIES = {
    Toggle.WIFI: "wifi_enabled",
    Toggle.BLUETOOTH: "bluetooth_enabled",
    Toggle.AIRPLANE_MODE: "airplane_mode",
    Toggle.DARK_THEME: "dark_theme_enabled",
    Toggle.BATTERY_SAVER: "battery_saver_enabled",
    Toggle.LOCATION: "location_enabled",
    Toggle.DO_NOT_DISTURB: "dnd_enabled",
    Toggle.AUTO_ROTATE: "auto_rotate_enabled",
    Toggle.AUTO_TIME: "auto_time_enabled",
}

QUERIES: dict[str, Callable[[PhoneState], str]] = {
    **{name: _toggle(toggle) for toggle, name in TOGGLE_QUERIES.items()},
    "current_app": lambda state: state.package,
    "current_activity": lambda state: f"{state.package}/{state.screen}",
    "current_screen": lambda state: state.screen,
    "is_home_screen": lambda state: _truth(state.screen.partition("/")[0] == "home"),
    "home_page": lambda state: str(state.home_page),
    "num_home_pages": lambda state: str(len(state.home_pages)),
    "recent_apps": lambda state: _json([find_app(app).package for app in state.recent_apps]),
    "shade": lambda state: state.shade or "",
    "screen_on": lambda state: _truth(state.is_screen_on),
    "usb_debugging": _switch("usb_debugging"),
    "call_vibration": _switch("call_vibration"),
    "connected_wifi": lambda state: state.system.connected_network if state.is_on(Toggle.WIFI) else "",
    "saved_wifi": lambda state: _json([n.name for n in state.system.networks if n.is_saved]),
    "notification_count": lambda state: str(len(state.system.shown_notifications())),
    "system_language": lambda state: state.system.language,
    "screen_lock": lambda state: state.system.screen_lock,
    "time_zone": lambda state: state.system.time_zone,
    "wallpaper": lambda state: WALLPAPER_NAMES[state.wallpaper],
    "installed_apps": lambda state: _json([find_app(entry.app).package for entry in state.system.apps]),
    "chrome_cache_cleared": lambda state: _cache_cleared(state, "com.android.chrome"),
    "brightness_level": lambda state: str(state.brightness_level),
    "screen_timeout": lambda state: str(state.screen_timeout_ms),
    "media_volume": lambda state: str(state.media_volume),
    "battery_level": lambda state: str(state.battery_pct),
    "clock": lambda state: state.clock,
    "focused_field": lambda state: state.focus or "",
    "draft_text": lambda state: state.draft,
    # such as "name=Zoe number=5550"; empty fields are left out
    "typed": lambda state: " ".join(f"{field}={text}" for field, text in sorted(state.typed.items()) if text),
    "note_texts": lambda state: _json(state.notes),
    "shown_note": lambda state: state.notes[int(subject(state))] if state.screen.startswith("notes/note:") else "",
    "threads": lambda state: _json([asdict(thread) for thread in state.threads]),
    "sent_messages": lambda state: _json(
        [{"to": thread.contact, "text": text.text} for thread in state.threads for text in thread.texts if text.is_mine]
    ),
    "num_photos": lambda state: str(state.num_photos),
    "screenshots": lambda state: _json(state.apps.screenshots),
    "num_screenshots": lambda state: str(len(state.apps.screenshots)),
    "playing_track": lambda state: "" if state.track is None else str(state.track),
    "playing_title": lambda state: "" if state.track is None else state.apps.tracks[state.track][0],
    "calls": lambda state: _json(state.calls),
    "called_numbers": lambda state: _json([_digits(number) for number in state.calls]),
    "callee": lambda state: _digits(state.calls[-1]) if state.screen == "phone/call" else "",
    "contacts": lambda state: _json([[contact.name, contact.number] for contact in state.apps.contacts]),
    "dialled_number": lambda state: state.dialled,
    "calculation": lambda state: state.calculation,
    "alarms_on": lambda state: _json([state.apps.alarms[i] for i in state.alarms_on]),
    "timer_s": lambda state: str(state.apps.timer_s),
    "current_url": _current_url,
    "current_search": lambda state: (
        " ".join(subject(state).lower().split()) if _current_url(state).startswith(SEARCH) else ""
    ),
}


def _find_installed(state: PhoneState, package: str) -> InstalledApp | None:
    return next((entry for entry in state.system.apps if find_app(entry.app).package == package), None)


def _of_app(read: Callable[[InstalledApp], str], *, absent: str = "false") -> Callable[[PhoneState, str], str]:
    def lookup(state: PhoneState, package: str) -> str:
        entry = _find_installed(state, package)
        return absent if entry is None else read(entry)

    return lookup


_cache_cleared = _of_app(lambda app: _truth(app.cache_mb == 0))


def _home_page_of(state: PhoneState, package: str) -> str:
    entry = _find_installed(state, package)
    page = None if entry is None else page_of(state.home_pages, entry.app)
    return "" if page is None else str(page)


def _message_draft(state: PhoneState, contact: str) -> str:
    is_open = state.app == "messages" and bool(state.subscreens) and state.subscreens[-1] != "new"
    return state.draft if is_open and conversation_with(state, state.subscreens[-1]) == contact else ""


LOOKUPS: dict[str, Callable[[PhoneState, str], str]] = {
    "app_installed": _of_app(lambda app: "true"),
    "app_running": _of_app(lambda app: _truth(app.is_running)),
    "app_storage_mb": _of_app(lambda app: str(app.size_mb + app.cache_mb), absent=""),
    "app_notifications": _of_app(lambda app: _truth(app.may_notify)),
    "cache_cleared": _cache_cleared,
    "wifi_saved": lambda state, name: _truth(any(n.is_saved and n.name == name for n in state.system.networks)),
    "quick_tile": lambda state, toggle: (
        _truth(state.is_on(Toggle(toggle))) if toggle in state.system.tiles_used else "untouched"
    ),
    "brightness_is_about": lambda state, percent: _truth(
        abs(100 * state.brightness_level / MAX_BRIGHTNESS - int(percent)) <= _BRIGHTNESS_TOLERANCE
    ),
    "media_volume_is_about": lambda state, percent: _truth(
        abs(state.media_volume - MAX_VOLUME * int(percent) / 100) <= 1
    ),
    "home_page_of": _home_page_of,
    "home_folder": lambda state, name: " ".join(sorted(find_app(app).package for app in apps_in_folder(state, name))),
    "on_home": lambda state, package: _truth(_home_page_of(state, package) != ""),
    "has_note": lambda state, text: _truth(text in state.notes),
    "contact_number": lambda state, name: state.apps.number_of(name) or "",
    "contact_digits": lambda state, name: _digits(state.apps.number_of(name) or ""),
    "file_exists": lambda state, path: _truth(exists_on_device(state, path)),
    "message_draft": _message_draft,
    "is_alarm_on": lambda state, time: _truth(time in [state.apps.alarms[i] for i in state.alarms_on]),
}
"""Queries with an argument, written "name:argument", such as "app_installed:com.instagram.android"."""
