"""Reading what the apps and the launcher hold; lookups take an argument after a colon ("contact_number:Emma")."""

import json
from collections.abc import Callable

from cua_rl.devices.simulator.app_reducer import conversation_with
from cua_rl.devices.simulator.browser_pages import SEARCH
from cua_rl.devices.simulator.file_tree import exists_on_device
from cua_rl.devices.simulator.home_folders import find_folder
from cua_rl.devices.simulator.home_layout import page_of
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import find_app


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _digits(text: str) -> str:
    return "".join(char for char in text if char.isdecimal() or char in "*#+")


def _typed(state: PhoneState) -> str:
    """What stands in the screen's fields, such as "name=Zoe number=5550"; empty ones are left out."""
    values = dict(state.form) | ({} if state.draft_field is None else {state.draft_field: state.draft})
    return " ".join(f"{field}={value}" for field, value in sorted(values.items()) if value)


def _current_url(state: PhoneState) -> str:
    return state.subscreens[-1] if state.app == "chrome" and state.subscreens else ""


def _current_search(state: PhoneState) -> str:
    url = _current_url(state)
    return " ".join(url.removeprefix(SEARCH).lower().split()) if url.startswith(SEARCH) else ""


def _callee(state: PhoneState) -> str:
    return _digits(state.calls[-1]) if state.screen == "phone/call" else ""


def _playing_title(state: PhoneState) -> str:
    return "" if state.track is None else state.apps.tracks[state.track][0]


def _shown_note(state: PhoneState) -> str:
    name = state.screen
    return state.notes[int(name.partition(":")[2])] if name.startswith("notes/note:") else ""


APP_QUERIES: dict[str, Callable[[PhoneState], str]] = {
    "contacts": lambda state: json.dumps([[contact.name, contact.number] for contact in state.apps.contacts]),
    "dialled_number": lambda state: state.dialled,
    "called_numbers": lambda state: json.dumps([_digits(number) for number in state.calls]),
    "callee": _callee,
    "alarms_on": lambda state: json.dumps([state.apps.alarms[i] for i in state.alarms_on]),
    "timer_s": lambda state: str(state.apps.timer_s),
    "current_url": _current_url,
    "current_search": _current_search,
    "screenshots": lambda state: json.dumps(state.apps.screenshots),
    "num_screenshots": lambda state: str(len(state.apps.screenshots)),
    "playing_title": _playing_title,
    "shown_note": _shown_note,
    "num_home_pages": lambda state: str(len(state.home_pages)),
    "typed": _typed,
}


def _home_page_of(state: PhoneState, package: str) -> str:
    app = next((entry.app for entry in state.system.apps if find_app(entry.app).package == package), None)
    page = None if app is None else page_of(state.home_pages, app)
    return "" if page is None else str(page)


def _home_folder(state: PhoneState, name: str) -> str:
    """The packages in a folder on a home page, sorted; "" if there is none."""
    folder = find_folder(state, name)
    return "" if folder is None else " ".join(sorted(find_app(app).package for app in folder.apps))


def _message_draft(state: PhoneState, contact: str) -> str:
    is_open = state.app == "messages" and bool(state.subscreens) and state.subscreens[-1] != "new"
    return state.draft if is_open and conversation_with(state, state.subscreens[-1]) == contact else ""


APP_LOOKUPS: dict[str, Callable[[PhoneState, str], str]] = {
    "home_page_of": _home_page_of,
    "home_folder": _home_folder,
    "on_home": lambda state, package: _truth(_home_page_of(state, package) != ""),
    "has_note": lambda state, text: _truth(text in state.notes),
    "contact_number": lambda state, name: state.apps.number_of(name) or "",
    "contact_digits": lambda state, name: _digits(state.apps.number_of(name) or ""),
    "file_exists": lambda state, path: _truth(exists_on_device(state, path)),
    "message_draft": _message_draft,
    "is_alarm_on": lambda state, time: _truth(time in [state.apps.alarms[i] for i in state.alarms_on]),
}
"""By name; the argument of home_page_of and on_home is a package, such as "com.android.weather"."""
