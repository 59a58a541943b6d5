"""Reading the phone's state by name: what validators and experts ask; agents never see it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches

from cua_rl.devices.simulator.app_queries import APP_LOOKUPS, APP_QUERIES
from cua_rl.devices.simulator.catalog import Toggle
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import find_app
from cua_rl.devices.simulator.system_queries import SYSTEM_LOOKUPS, SYSTEM_QUERIES
from cua_rl.errors import TaskError


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


def _toggle(toggle: Toggle) -> Callable[[PhoneState], str]:
    return lambda state: _truth(state.is_on(toggle))


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _json(value: Sequence[object]) -> str:
    return json.dumps(list(value))


def _sent_messages(state: PhoneState) -> str:
    return _json(
        [{"to": thread.contact, "text": text.text} for thread in state.threads for text in thread.texts if text.is_mine]
    )


QUERIES: dict[str, Callable[[PhoneState], str]] = {
    "current_app": lambda state: state.package,
    "current_activity": lambda state: f"{state.package}/{state.screen}",
    "current_screen": lambda state: state.screen,
    "is_home_screen": lambda state: _truth(state.screen.partition("/")[0] == "home"),
    "home_page": lambda state: str(state.home_page),
    "recent_apps": lambda state: _json([find_app(app).package for app in state.recent_apps]),
    "screen_on": lambda state: _truth(state.is_screen_on),
    "wifi_enabled": _toggle(Toggle.WIFI),
    "bluetooth_enabled": _toggle(Toggle.BLUETOOTH),
    "airplane_mode": _toggle(Toggle.AIRPLANE_MODE),
    "dark_theme_enabled": _toggle(Toggle.DARK_THEME),
    "battery_saver_enabled": _toggle(Toggle.BATTERY_SAVER),
    "location_enabled": _toggle(Toggle.LOCATION),
    "dnd_enabled": _toggle(Toggle.DO_NOT_DISTURB),
    "auto_rotate_enabled": _toggle(Toggle.AUTO_ROTATE),
    "auto_time_enabled": _toggle(Toggle.AUTO_TIME),
    "brightness_level": lambda state: str(state.brightness_level),
    "screen_timeout": lambda state: str(state.screen_timeout_ms),
    "media_volume": lambda state: str(state.media_volume),
    "battery_level": lambda state: str(state.battery_pct),
    "clock": lambda state: state.clock,
    "focused_field": lambda state: state.focus or "",
    "draft_text": lambda state: state.draft,
    "note_texts": lambda state: _json(state.notes),
    "threads": lambda state: _json([asdict(thread) for thread in state.threads]),
    "sent_messages": _sent_messages,
    "num_photos": lambda state: str(state.num_photos),
    "playing_track": lambda state: "" if state.track is None else str(state.track),
    "calls": lambda state: _json(state.calls),
    "calculation": lambda state: state.calculation,
    **SYSTEM_QUERIES,
    **APP_QUERIES,
}

LOOKUPS: dict[str, Callable[[PhoneState, str], str]] = {**SYSTEM_LOOKUPS, **APP_LOOKUPS}
"""Queries with an argument, written "name:argument"."""
