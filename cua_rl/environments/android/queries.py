"""Reading the state of a real Android phone by the names that tasks use for the simulated one."""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from shlex import quote

from cua_rl.environments.android import outputs
from cua_rl.environments.android.outputs import (
    parse_packages,
    parse_permissions,
    parse_process_names,
    parse_rows,
    truth,
)
from cua_rl.environments.android.shell import AndroidShell
from cua_rl.types.errors import TaskError

_CONTACTS = (
    "content query --uri content://com.android.contacts/data/phones --projection raw_contact_id:data1:display_name"
)
_SENT = "content query --uri content://sms --projection address:body --where 'type in (2,4,6)' --sort 'date ASC'"
CALLS = "content query --uri content://call_log/calls --projection number --where type=2 --sort 'date ASC'"
_PICTURES = "content query --uri content://media/external/images/media --projection relative_path"


NOTIFY_PERMISSION = "android.permission.POST_NOTIFICATIONS"
"""Since Android 13 whether an app may notify is one of its permissions."""
HOME_ACTIVITY = "cmd package resolve-activity --brief -a android.intent.action.MAIN -c android.intent.category.HOME"
FOCUS = "dumpsys window displays"
MEDIA_VOLUME = "cmd media_session volume --stream 3 --get"
NOTIFICATIONS = "dumpsys notification"
NETWORKS = "cmd wifi list-networks"
ALARMS = "dumpsys alarm"
MAX_BRIGHTNESS = 255
BRIGHTNESS_TOLERANCE = 5
"""Percentage points."""
_LANGUAGE = "settings get system system_locales; getprop persist.sys.locale; getprop ro.product.locale"
_RING_VIBRATION = "; ".join(
    f"settings get system {key}" for key in ("vibrate_on", "ring_vibration_intensity", "vibrate_when_ringing")
)
_KEEPS = "apps do not expose what they show or what is being typed"
_LAUNCHER = "launchers do not expose the layout of their pages"
UNREADABLE: Mapping[str, str] = {
    **dict.fromkeys(
        ("focused_field", "draft_text", "message_draft", "dialled_number", "current_url", "current_search", "typed"),
        _KEEPS,
    ),
    **dict.fromkeys(("shown_note", "note_texts", "has_note", "calculation", "timer_s"), _KEEPS),
    **dict.fromkeys(("home_page", "home_page_of", "home_folder", "num_home_pages", "on_home"), _LAUNCHER),
    "current_screen": "Android reports the activity in front, but not which page it shows",
    "shade": "Android reports that the shade is open, but not which part",
    "quick_tile": "Android does not report whether a switch was flipped in the shade or in Settings",
    "wallpaper": "wallpapers have no names on a real phone",
    "screen_lock": "a lock set by one task would lock the next one out",
    "app_storage_mb": "Android measures apps once a day, and shows newer figures only in Settings",
    "cache_cleared": "Android does not show the shell how large an app's cache is",
    "chrome_cache_cleared": "Android does not show the shell how large an app's cache is",
    "screenshots": "the content of a screenshot is not recorded; use num_screenshots",
    "playing_track": "tracks have no numbers on a real phone",
    "playing_title": "players report title, artist and album in one line, each in its own format",
    "callee": "Android hides the number of a running call; use called_numbers",
    "threads": "received messages do not distinguish conversations; use sent_messages",
}


async def read_contacts(shell: AndroidShell, argument: str) -> str:
    """[name, number] pairs."""
    return json.dumps([[name, number] for number, name in await _contacts(shell)])


async def read_contact_number(shell: AndroidShell, name: str) -> str:
    """The number of somebody, "" if there is no such contact."""
    return next((number for number, other in await _contacts(shell) if other == name), "")


async def read_contact_digits(shell: AndroidShell, name: str) -> str:
    """The same without spaces and dashes."""
    return dialled(await read_contact_number(shell, name))


async def read_sent_messages(shell: AndroidShell, argument: str) -> str:
    """To whom (the contact's name, or the number) and what, oldest first; those on their way count as sent."""
    messages = parse_rows(await shell.run(_SENT), ("address", "body"))
    names = dict(await _contacts(shell))
    return json.dumps([{"to": _whose(row["address"], names), "text": row["body"]} for row in messages])


async def read_calls(shell: AndroidShell, argument: str) -> str:
    """Numbers that were called, oldest first."""
    return json.dumps(await _calls(shell))


async def read_called_numbers(shell: AndroidShell, argument: str) -> str:
    """The same without spaces and dashes."""
    return json.dumps([dialled(number) for number in await _calls(shell)])


async def count_photos(shell: AndroidShell, argument: str) -> str:
    """How many pictures the camera took."""
    return str(sum(path.startswith("DCIM/") and "Screenshots" not in path for path in await _picture_paths(shell)))


async def count_screenshots(shell: AndroidShell, argument: str) -> str:
    """How many screenshots were kept."""
    return str(sum("Screenshots" in path for path in await _picture_paths(shell)))


async def read_contact_rows(shell: AndroidShell) -> list[Mapping[str, str]]:
    """Numbers of contacts: raw_contact_id, data1 (the number) and display_name."""
    return parse_rows(await shell.run(_CONTACTS), ("raw_contact_id", "data1", "display_name"))


async def _contacts(shell: AndroidShell) -> list[tuple[str, str]]:
    """(number, name)"""
    return [(row["data1"], row["display_name"]) for row in await read_contact_rows(shell)]


async def _calls(shell: AndroidShell) -> list[str]:
    return [row["number"] for row in parse_rows(await shell.run(CALLS), ("number",))]


async def _picture_paths(shell: AndroidShell) -> list[str]:
    return [row["relative_path"] for row in parse_rows(await shell.run(_PICTURES), ("relative_path",))]


def _whose(number: str, names: Mapping[str, str]) -> str:
    """The contact with this number, with or without country code; the number itself if there is none."""
    wanted = _significant_digits(number)
    for other, name in names.items():
        digits = _significant_digits(other)
        shorter, longer = sorted((wanted, digits), key=len)
        if wanted == digits or (len(shorter) >= 7 and longer.endswith(shorter)):
            return name
    return number


def dialled(number: str) -> str:
    """The keys that dial a number, without spaces and dashes."""
    return re.sub(r"[^\d*#+]", "", number)


def _significant_digits(number: str) -> str:
    return re.sub(r"\D", "", number).lstrip("0")


async def read_installed_apps(shell: AndroidShell, argument: str) -> str:
    """Every package, Android's own included."""
    return json.dumps(await _packages(shell))


async def read_app_installed(shell: AndroidShell, package: str) -> str:
    return truth(package in await _packages(shell))


async def read_app_running(shell: AndroidShell, package: str) -> str:
    names = parse_process_names(await shell.run("ps -A -o NAME"))
    return truth(any(name == package or name.startswith(f"{package}:") for name in names))


async def read_app_permission(shell: AndroidShell, argument: str) -> str:
    """Whether PACKAGE/PERMISSION is granted; not if the app is not there or never asks for it."""
    package, slash, permission = argument.partition("/")
    if not slash:
        raise TaskError(f"expected app_permission:PACKAGE/PERMISSION, got the argument {argument!r}")
    granted = await read_permissions(shell, package)
    return truth(granted is not None and granted.get(full_permission(permission), False))


async def read_app_notifications(shell: AndroidShell, package: str) -> str:
    return await read_app_permission(shell, f"{package}/{NOTIFY_PERMISSION}")


async def read_permissions(shell: AndroidShell, package: str) -> dict[str, bool] | None:
    """Permission -> granted; None if the package is not installed."""
    if package not in await _packages(shell):
        return None
    return parse_permissions(await shell.run(f"dumpsys package {quote(package)}"), package)


def full_permission(name: str) -> str:
    """ "CAMERA" is short for "android.permission.CAMERA"."""
    return name if "." in name else f"android.permission.{name}"


async def _packages(shell: AndroidShell) -> list[str]:
    return parse_packages(await shell.run("pm list packages --user 0"))


Read = Callable[[AndroidShell, str], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AndroidQuery:
    """How to read one piece of state; `argument` says what follows the colon of a name such as "file_exists:/a"."""

    read: Read
    argument: str = ""


async def read_android_query(shell: AndroidShell, name: str) -> str:
    """Read one piece of state, in the words of the simulated phone ("true", "128", a JSON list).

    Raises `TaskError` for a name that cannot be read on a real phone, `DeviceError` for a phone that is gone or prints
    something else than Android does.
    """
    base, argument = split_query(name)
    return await ANDROID_QUERIES[base].read(shell, argument)


def split_query(name: str) -> tuple[str, str]:
    """The query and its argument, "" without one; raises `TaskError` for what no real phone answers."""
    base, _, argument = name.partition(":")
    query = ANDROID_QUERIES.get(base)
    if query is None:
        near = get_close_matches(base, ANDROID_QUERIES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(ANDROID_QUERIES))}"
        reason = f": {UNREADABLE[base]}" if base in UNREADABLE else f"; {hint}"
        raise TaskError(f"expected a query that a real phone answers, got {name!r}{reason}")
    if bool(query.argument) != bool(argument):
        wanted = f"{base}:{query.argument.upper()}" if query.argument else base
        raise TaskError(f"expected the query {wanted!r}, got {name!r}")
    return base, argument


def _output(command: str, parse: Callable[[str], str]) -> AndroidQuery:
    async def read(shell: AndroidShell, argument: str) -> str:
        return parse(await shell.run(command))

    return AndroidQuery(read=read)


def _listed(command: str, parse: Callable[[str], Collection[str]]) -> Read:
    """Whether the argument is among what the command lists."""

    async def read(shell: AndroidShell, argument: str) -> str:
        return truth(argument in parse(await shell.run(command)))

    return read


def _choice(namespace: str, key: str, meanings: Mapping[str, str]) -> AndroidQuery:
    parse = partial(outputs.parse_choice, meanings=meanings, setting=f"{namespace} {key}")
    return _output(f"settings get {namespace} {key}", parse)


def _number(namespace: str, key: str) -> AndroidQuery:
    return _output(f"settings get {namespace} {key}", partial(outputs.parse_integer, setting=f"{namespace} {key}"))


def _current_activity(text: str) -> str:
    return outputs.parse_focus(text)[0]


async def _is_home_screen(shell: AndroidShell, argument: str) -> str:
    home = await read_home_activity(shell)
    activity, window = outputs.parse_focus(await shell.run(FOCUS))
    return outputs.truth(activity == home and window.partition("/")[0] == home.partition("/")[0])


async def read_home_activity(shell: AndroidShell) -> str:
    """The activity of the default home screen, PACKAGE/CLASS."""
    return outputs.parse_home_activity(await shell.run(HOME_ACTIVITY))


async def _file_exists(shell: AndroidShell, path: str) -> str:
    if not path.startswith(("/sdcard/", "/storage/", "/data/local/tmp/")) or ".." in path.split("/"):
        raise TaskError(
            f"expected a path below /sdcard, /storage or /data/local/tmp, the only ones adb may see, got {path!r}"
        )
    path = path.rstrip("/")
    return outputs.parse_file_exists(await shell.run(f"ls -d {quote(path)} 2>&1"), path)


async def _brightness_is_about(shell: AndroidShell, percent: str) -> str:
    level = int(await read_android_query(shell, "brightness_level"))
    return outputs.truth(abs(100 * level / MAX_BRIGHTNESS - _percent(percent)) <= BRIGHTNESS_TOLERANCE)


async def _media_volume_is_about(shell: AndroidShell, percent: str) -> str:
    level, _, maximum = outputs.parse_volume(await shell.run(MEDIA_VOLUME))
    return outputs.truth(abs(level - maximum * _percent(percent) / 100) <= 1)


def _percent(text: str) -> int:
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > 100:
        raise TaskError(f"expected percent from 0 to 100, got {text!r}")
    return int(text)


ANDROID_QUERIES: Mapping[str, AndroidQuery] = {
    "current_app": _output(FOCUS, lambda text: _current_activity(text).partition("/")[0]),
    "current_activity": _output(FOCUS, _current_activity),
    "is_home_screen": AndroidQuery(read=_is_home_screen),
    "recent_apps": _output("dumpsys activity recents", lambda text: json.dumps(outputs.parse_recent_packages(text))),
    "screen_on": _output("dumpsys power", outputs.parse_wakefulness),
    "wifi_enabled": _choice("global", "wifi_on", outputs.WIFI_ON),
    "bluetooth_enabled": _output("dumpsys bluetooth_manager", outputs.parse_bluetooth),
    "airplane_mode": _choice("global", "airplane_mode_on", outputs.BINARY),
    "dark_theme_enabled": _output("cmd uimode night; dumpsys uimode", outputs.parse_night_mode),
    "battery_saver_enabled": _choice("global", "low_power", outputs.BINARY_OFF_IF_UNSET),
    "location_enabled": _choice("secure", "location_mode", outputs.LOCATION_MODE),
    "dnd_enabled": _choice("global", "zen_mode", outputs.ZEN_MODE),
    "auto_rotate_enabled": _choice("system", "accelerometer_rotation", outputs.BINARY),
    "auto_time_enabled": _choice("global", "auto_time", outputs.BINARY),
    "developer_options": _choice("global", "development_settings_enabled", outputs.BINARY_OFF_IF_UNSET),
    "usb_debugging": _choice("global", "adb_enabled", outputs.BINARY_OFF_IF_UNSET),
    "call_vibration": _output(_RING_VIBRATION, outputs.parse_ring_vibration),
    "brightness_level": _number("system", "screen_brightness"),
    "brightness_is_about": AndroidQuery(read=_brightness_is_about, argument="percent"),
    "screen_timeout": _number("system", "screen_off_timeout"),
    "media_volume": _output(MEDIA_VOLUME, lambda text: str(outputs.parse_volume(text)[0])),
    "media_volume_is_about": AndroidQuery(read=_media_volume_is_about, argument="percent"),
    "battery_level": _output("dumpsys battery", outputs.parse_battery),
    "clock": _output("date +%H:%M", outputs.parse_clock),
    "time_zone": _output("getprop persist.sys.timezone", outputs.parse_time_zone),
    "system_language": _output(_LANGUAGE, outputs.parse_language),
    "notification_count": _output(NOTIFICATIONS, lambda text: str(outputs.count_clearable_notifications(text))),
    "alarms_on": _output(ALARMS, lambda text: json.dumps(outputs.parse_alarm_times(text))),
    "is_alarm_on": AndroidQuery(read=_listed(ALARMS, outputs.parse_alarm_times), argument="time"),
    "connected_wifi": _output("cmd wifi status", outputs.parse_connected_network),
    "saved_wifi": _output(NETWORKS, lambda text: json.dumps(list(outputs.parse_known_networks(text)))),
    "wifi_saved": AndroidQuery(read=_listed(NETWORKS, outputs.parse_known_networks), argument="name"),
    "contacts": AndroidQuery(read=read_contacts),
    "contact_number": AndroidQuery(read=read_contact_number, argument="name"),
    "contact_digits": AndroidQuery(read=read_contact_digits, argument="name"),
    "sent_messages": AndroidQuery(read=read_sent_messages),
    "calls": AndroidQuery(read=read_calls),
    "called_numbers": AndroidQuery(read=read_called_numbers),
    "num_photos": AndroidQuery(read=count_photos),
    "num_screenshots": AndroidQuery(read=count_screenshots),
    "installed_apps": AndroidQuery(read=read_installed_apps),
    "app_installed": AndroidQuery(read=read_app_installed, argument="package"),
    "app_running": AndroidQuery(read=read_app_running, argument="package"),
    "app_permission": AndroidQuery(read=read_app_permission, argument="package/permission"),
    "app_notifications": AndroidQuery(read=read_app_notifications, argument="package"),
    "file_exists": AndroidQuery(read=_file_exists, argument="path"),
}
"""Queries that work without root on phones of any manufacturer.

Android knows only the next alarm; later ones are not listed.
"""
