"""The arguments and values of queries, so that a check that can never hold is found at the start.

A kind of value accepts whatever some device could answer; a simulated phone narrows it down to what it can show
(`cua_rl.environments.phone.simulator.query_values`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A kind of value."""

    says: str
    """For messages: "a whole number"."""
    example: object
    """One of them, as a check writes it."""
    pattern: str = r"(?s:.*)"
    items: "Values | None" = None
    """The kind of the items, where the value is a JSON list."""
    keys: tuple[str, ...] = ()
    """The keys, where the value is a JSON object; `pattern` is only for texts."""

    def accepts(self, value: object) -> bool:
        """Whether the JSON value is of this kind."""
        if self.items is not None:
            return isinstance(value, list) and all(map(self.items.accepts, cast("list[object]", value)))
        if isinstance(self.example, str | int):
            return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None
        return (isinstance(value, dict) and set(cast("dict[str, object]", value)) == set(self.keys)) or (
            isinstance(value, list) and not self.keys
        )

    def parse(self, text: str) -> str | None:
        """An answer that equals `text`, in the form in which queries write it; None if none does."""
        if self.items is None:
            return text if self.accepts(text) else None
        try:
            value = cast("object", json.loads(text))
        except (ValueError, RecursionError):
            return None
        if not self.accepts(value):
            return None
        items, keys = cast("list[object]", value), self.items.keys
        return json.dumps(
            [{k: cast("Mapping[str, object]", item)[k] for k in keys} if keys else item for item in items]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query: what it answers, and what follows its colon, if anything does."""

    values: Values
    argument: Values | None = None
    needs_argument: bool = True


def _list(items: Values, says: str, example: object) -> Values:
    return Values(says=f"a list of {says}", example=example, items=items)


def _called(name: str) -> Values:
    return Values(says="a name", example=name, pattern=r"(?s:.+)")


TEXT = Values(says="text", example="tea")
TRUTH = Values(says="'true' or 'false'", example=True, pattern="true|false")
WHOLE = Values(says="a whole number", example=2, pattern=r"0|[1-9]\d*")
PACKAGE = Values(
    says="an app's package", example="com.android.deskclock", pattern=r"android|[A-Za-z]\w*(?:\.[A-Za-z]\w*)+"
)
_ACTIVITY = Values(
    says="PACKAGE/ACTIVITY, on the simulated phone PACKAGE/SCREEN",
    example="com.android.deskclock/clock",
    pattern=rf"(?:{PACKAGE.pattern})/(?s:.+)",
)
TIME = Values(says="a time of day", example="06:45", pattern=r"(?:[01]\d|2[0-3]):[0-5]\d")
_PERCENT = Values(says="percent from 0 to 100", example=40, pattern=r"\d{1,2}|100")
_DIGITS = Values(says="the keys that dial a number", example="5552040", pattern=r"[\d*#+]*")
_NETWORK = Values(says="a network's name, or ''", example="Birch")
_PATH = Values(
    says="a path below /sdcard or /storage",
    example="/sdcard/Download/garden",
    pattern=r"/(?:sdcard|storage|data/local/tmp)/(?s:.+)",
)
_PERMISSION = Values(
    says="PACKAGE/PERMISSION", example="com.android.camera2/CAMERA", pattern=rf"(?:{PACKAGE.pattern})/[\w.]+"
)
_PACKAGES = _list(PACKAGE, "packages", ["com.android.deskclock"])
_TEXTS = _list(TEXT, "texts", ["Buy bread"])
_MESSAGE = Values(says="a message", example={"to": "Emma", "text": "On my way"}, keys=("to", "text"))
_PERSON = Values(says="a name and a number", example=["Emma", "555 2040"])
_THREAD = Values(says="a conversation", example={"contact": "Emma", "texts": []}, keys=("contact", "texts"))
_PAGE = Values(says="the number of a home page, from 0, or ''", example=1, pattern=r"\d?")
_TRUTHS = (
    "wifi_enabled bluetooth_enabled airplane_mode dark_theme_enabled battery_saver_enabled location_enabled "
    "dnd_enabled auto_rotate_enabled auto_time_enabled is_home_screen screen_on developer_options usb_debugging "
    "call_vibration chrome_cache_cleared"
)
_NUMBERS = "home_page num_home_pages notification_count num_photos num_screenshots battery_level"
_TOLD = "draft_text shown_note calculation typed"

PHONE_QUERIES: Mapping[str, Query] = {
    **{name: Query(values=TRUTH) for name in _TRUTHS.split()},
    **{name: Query(values=WHOLE) for name in _NUMBERS.split()},
    "brightness_level": Query(values=Values(says="a whole number, 1 to 255", example=255, pattern=WHOLE.pattern)),
    "media_volume": Query(values=Values(says="a whole number, 0 to 15", example=15, pattern=WHOLE.pattern)),
    "screen_timeout": Query(values=Values(says="milliseconds", example=300000, pattern=WHOLE.pattern)),
    "timer_s": Query(values=Values(says="seconds, in whole minutes", example=300, pattern=WHOLE.pattern)),
    "playing_track": Query(values=Values(says="the track's number, from 0, or ''", example=1, pattern=r"\d*")),
    "current_app": Query(values=PACKAGE),
    "current_activity": Query(values=_ACTIVITY),
    "current_screen": Query(values=Values(says="a screen", example="settings/display")),
    "recent_apps": Query(values=_PACKAGES),
    "installed_apps": Query(values=_PACKAGES),
    "shade": Query(values=Values(says="the part that is open, or ''", example="quick_settings")),
    "connected_wifi": Query(values=_NETWORK),
    "saved_wifi": Query(values=_list(_NETWORK, "networks", ["Birch"])),
    "system_language": Query(values=Values(says="a language's own name", example="Deutsch")),
    "screen_lock": Query(values=Values(says="a kind of lock", example="PIN")),
    "time_zone": Query(values=Values(says="a city", example="Berlin")),
    "wallpaper": Query(values=Values(says="a wallpaper's name", example="Teal")),
    "clock": Query(values=TIME),
    "alarms_on": Query(values=_list(TIME, "times", ["06:45"])),
    "focused_field": Query(values=Values(says="a text field, or ''", example="message")),
    **{name: Query(values=TEXT) for name in _TOLD.split()},
    "note_texts": Query(values=_TEXTS),
    "threads": Query(values=_list(_THREAD, "conversations", [_THREAD.example])),
    "sent_messages": Query(values=_list(_MESSAGE, "messages", [_MESSAGE.example])),
    "screenshots": Query(values=_list(TEXT, "screens", ["calculator"])),
    "playing_title": Query(values=Values(says="a track's title, or ''", example="Late Train")),
    "calls": Query(values=_list(TEXT, "numbers as dialled", ["555 2040"])),
    "called_numbers": Query(values=_list(_DIGITS, "numbers", ["5552040"])),
    "callee": Query(values=_DIGITS),
    "dialled_number": Query(values=_DIGITS),
    "contacts": Query(values=_list(_PERSON, "[name, number]", [_PERSON.example])),
    "current_url": Query(values=Values(says="an address, or ''", example="news.example")),
    "current_search": Query(values=Values(says="words in lower case", example="apple cake", pattern=r"[^A-Z]*")),
    "app_installed": Query(values=TRUTH, argument=PACKAGE),
    "app_running": Query(values=TRUTH, argument=PACKAGE),
    "app_storage_mb": Query(values=WHOLE, argument=PACKAGE),
    "app_notifications": Query(values=TRUTH, argument=PACKAGE),
    "app_permission": Query(values=TRUTH, argument=_PERMISSION),
    "cache_cleared": Query(values=TRUTH, argument=PACKAGE),
    "wifi_saved": Query(values=TRUTH, argument=_called("Birch")),
    "quick_tile": Query(
        values=Values(says="'true', 'false' or 'untouched'", example=True, pattern="true|false|untouched"),
        argument=Values(says="a quick tile", example="wifi"),
    ),
    "brightness_is_about": Query(values=TRUTH, argument=_PERCENT),
    "media_volume_is_about": Query(values=TRUTH, argument=_PERCENT),
    "home_page_of": Query(values=_PAGE, argument=PACKAGE),
    "home_folder": Query(
        values=Values(says="packages in alphabetical order, or ''", example="com.android.email com.android.notes"),
        argument=_called("Fun"),
    ),
    "on_home": Query(values=TRUTH, argument=PACKAGE),
    "has_note": Query(values=TRUTH, argument=_called("Buy bread")),
    "contact_number": Query(values=Values(says="a number as written", example="555 2040"), argument=_called("Emma")),
    "contact_digits": Query(values=_DIGITS, argument=_called("Emma")),
    "file_exists": Query(values=TRUTH, argument=_PATH),
    "message_draft": Query(values=TEXT, argument=_called("Emma")),
    "is_alarm_on": Query(values=TRUTH, argument=TIME),
}
"""Queries of phones, simulated or not."""

_SELECTOR = Values(says="a CSS selector", example="#q", pattern=r"(?s:.+)")
PAGE_QUERIES: Mapping[str, Query] = {
    "url": Query(values=Values(says="a whole address", example="http://127.0.0.1:8000/", pattern=r"[a-z][\w+.-]*:.*")),
    "title": Query(values=TEXT),
    "text": Query(values=TEXT, argument=_SELECTOR, needs_argument=False),
    "value": Query(values=TEXT, argument=_SELECTOR),
    "checked": Query(values=TRUTH, argument=_SELECTOR),
    "count": Query(values=WHOLE, argument=_SELECTOR),
}
LINUX_BOX_QUERIES: Mapping[str, Query] = {
    "file_exists": Query(values=TRUTH, argument=_called("/tmp/list.txt")),
    "file_text": Query(values=TEXT, argument=_called("/tmp/list.txt")),
    "app_running": Query(values=TRUTH, argument=_called("firefox")),
}
