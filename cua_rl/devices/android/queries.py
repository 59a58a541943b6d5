"""Reading the state of a real Android phone by the names that tasks use for the simulated one."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from shlex import quote

from cua_rl.devices.android import dumps, readings
from cua_rl.devices.android.shell import AndroidShell
from cua_rl.errors import TaskError

HOME_ACTIVITY = "cmd package resolve-activity --brief -a android.intent.action.MAIN -c android.intent.category.HOME"
FOCUS = "dumpsys window displays"
MEDIA_VOLUME = "cmd media_session volume --stream 3 --get"
NOTIFICATIONS = "dumpsys notification"
NETWORKS = "cmd wifi list-networks"
NOTIFY_PERMISSION = "android.permission.POST_NOTIFICATIONS"

_CONTACTS = "content query --uri content://com.android.contacts/data/phones --projection data1:display_name"
_SENT = "content query --uri content://sms --projection address:body --where 'type in (2,4,6)' --sort 'date ASC'"
_CALLS = "content query --uri content://call_log/calls --projection number --where type=2 --sort 'date ASC'"
_PHOTOS = "content query --uri content://media/external/images/media --projection _id"
_LANGUAGE = "settings get system system_locales; getprop persist.sys.locale; getprop ro.product.locale"
_RING_VIBRATION = "; ".join(
    f"settings get system {key}" for key in ("vibrate_on", "ring_vibration_intensity", "vibrate_when_ringing")
)

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
        raise TaskError(_unknown(name, base))
    if bool(query.argument) != bool(argument):
        wanted = f"{base}:{query.argument.upper()}" if query.argument else base
        raise TaskError(f"expected the query {wanted!r}, got {name!r}")
    return base, argument


def _unknown(name: str, base: str) -> str:
    reason = UNREADABLE.get(base)
    if reason is not None:
        return f"expected a query that a real phone answers, got {name!r}: {reason}"
    near = get_close_matches(base, ANDROID_QUERIES, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(ANDROID_QUERIES))}"
    return f"expected a query that a real phone answers, got {name!r}; {hint}"


def _output(command: str, parse: Callable[[str], str]) -> AndroidQuery:
    async def read(shell: AndroidShell, argument: str) -> str:
        return parse(await shell.run(command))

    return AndroidQuery(read=read)


def _choice(namespace: str, key: str, meanings: Mapping[str, str]) -> AndroidQuery:
    parse = partial(readings.parse_choice, meanings=meanings, setting=f"{namespace} {key}")
    return _output(f"settings get {namespace} {key}", parse)


def _number(namespace: str, key: str) -> AndroidQuery:
    return _output(f"settings get {namespace} {key}", partial(readings.parse_integer, setting=f"{namespace} {key}"))


def to_json(values: object) -> str:
    """JSON as the simulated phone writes it."""
    return json.dumps(values)


def _current_activity(text: str) -> str:
    return dumps.parse_focus(text).activity


async def _is_home_screen(shell: AndroidShell, argument: str) -> str:
    home = await read_home_activity(shell)
    focus = dumps.parse_focus(await shell.run(FOCUS))
    window_package = focus.window.partition("/")[0]
    return readings.truth(focus.activity == home and window_package == home.partition("/")[0])


async def read_home_activity(shell: AndroidShell) -> str:
    """The activity of the default home screen, PACKAGE/CLASS."""
    return readings.parse_home_activity(await shell.run(HOME_ACTIVITY))


async def _app_installed(shell: AndroidShell, package: str) -> str:
    return readings.parse_installed(await shell.run("pm list packages --user 0"), package)


async def _app_permission(shell: AndroidShell, argument: str) -> str:
    package, slash, permission = argument.partition("/")
    if not slash:
        raise TaskError(f"expected app_permission:PACKAGE/PERMISSION, got the argument {argument!r}")
    granted = await read_permissions(shell, package)
    return readings.truth(bool(granted) and granted.get(full_permission(permission), False))


async def _app_notifications(shell: AndroidShell, package: str) -> str:
    return await _app_permission(shell, f"{package}/{NOTIFY_PERMISSION}")


def full_permission(name: str) -> str:
    """ "CAMERA" is short for "android.permission.CAMERA"."""
    return name if "." in name else f"android.permission.{name}"


async def read_permissions(shell: AndroidShell, package: str) -> dict[str, bool] | None:
    """Permission -> granted; None if the package is not installed."""
    if await _app_installed(shell, package) == "false":
        return None
    return dumps.parse_permissions(await shell.run(f"dumpsys package {quote(package)}"), package)


async def _file_exists(shell: AndroidShell, path: str) -> str:
    if not path.startswith(("/sdcard/", "/storage/", "/data/local/tmp/")) or ".." in path.split("/"):
        raise TaskError(
            f"expected a path below /sdcard, /storage or /data/local/tmp, the only ones adb may see, got {path!r}"
        )
    path = path.rstrip("/")
    return readings.parse_file_exists(await shell.run(f"ls -d {quote(path)} 2>&1"), path)


async def _contacts(shell: AndroidShell, argument: str) -> str:
    rows = dumps.parse_rows(await shell.run(_CONTACTS), ("data1", "display_name"))
    return to_json([{"name": row["display_name"].strip(), "number": row["data1"]} for row in rows])


async def _sent_messages(shell: AndroidShell, argument: str) -> str:
    messages = dumps.parse_rows(await shell.run(_SENT), ("address", "body"))
    contacts = dumps.parse_rows(await shell.run(_CONTACTS), ("data1", "display_name"))
    names = {row["data1"]: row["display_name"].strip() for row in contacts}
    return to_json([{"to": _whose(row["address"], names), "text": row["body"].rstrip("\n")} for row in messages])


def _whose(number: str, names: Mapping[str, str]) -> str:
    """The contact with this number, with or without country code; the number itself if nobody has it."""
    wanted = _digits(number)
    for other, name in names.items():
        digits = _digits(other)
        shorter, longer = sorted((wanted, digits), key=len)
        if wanted == digits or (len(shorter) >= 7 and longer.endswith(shorter)):
            return name
    return number


def _digits(number: str) -> str:
    return re.sub(r"\D", "", number).lstrip("0")


async def _calls(shell: AndroidShell, argument: str) -> str:
    return to_json([row["number"].strip() for row in dumps.parse_rows(await shell.run(_CALLS), ("number",))])


async def _num_photos(shell: AndroidShell, argument: str) -> str:
    return str(len(dumps.parse_rows(await shell.run(_PHOTOS), ("_id",))))


async def _wifi_known(shell: AndroidShell, network: str) -> str:
    return readings.truth(network in dumps.parse_known_networks(await shell.run(NETWORKS)))


ANDROID_QUERIES: Mapping[str, AndroidQuery] = {
    "current_app": _output(FOCUS, lambda text: _current_activity(text).partition("/")[0]),
    "current_activity": _output(FOCUS, _current_activity),
    "is_home_screen": AndroidQuery(read=_is_home_screen),
    "recent_apps": _output("dumpsys activity recents", lambda text: to_json(dumps.parse_recent_packages(text))),
    "screen_on": _output("dumpsys power", readings.parse_wakefulness),
    "wifi_enabled": _choice("global", "wifi_on", readings.WIFI_ON),
    "bluetooth_enabled": _output("dumpsys bluetooth_manager", readings.parse_bluetooth),
    "airplane_mode": _choice("global", "airplane_mode_on", readings.BINARY),
    "dark_theme_enabled": _output("cmd uimode night; dumpsys uimode", readings.parse_night_mode),
    "battery_saver_enabled": _choice("global", "low_power", readings.BINARY_OFF_IF_UNSET),
    "location_enabled": _choice("secure", "location_mode", readings.LOCATION_MODE),
    "dnd_enabled": _choice("global", "zen_mode", readings.ZEN_MODE),
    "auto_rotate_enabled": _choice("system", "accelerometer_rotation", readings.BINARY),
    "auto_time_enabled": _choice("global", "auto_time", readings.BINARY),
    "developer_options_enabled": _choice("global", "development_settings_enabled", readings.BINARY_OFF_IF_UNSET),
    "usb_debugging_enabled": _choice("global", "adb_enabled", readings.BINARY_OFF_IF_UNSET),
    "call_vibration_enabled": _output(_RING_VIBRATION, readings.parse_ring_vibration),
    "brightness_level": _number("system", "screen_brightness"),
    "screen_timeout": _number("system", "screen_off_timeout"),
    "media_volume": _output(MEDIA_VOLUME, lambda text: str(readings.parse_volume(text)[0])),
    "battery_level": _output("dumpsys battery", readings.parse_battery),
    "clock": _output("date +%H:%M", readings.parse_clock),
    "system_language": _output(_LANGUAGE, readings.parse_language),
    "notification_count": _output(NOTIFICATIONS, lambda text: str(dumps.count_clearable_notifications(text))),
    "alarms": _output("dumpsys alarm", lambda text: to_json(dumps.parse_alarm_times(text))),
    "known_networks": _output(NETWORKS, lambda text: to_json(list(dumps.parse_known_networks(text)))),
    "connected_network": _output("cmd wifi status", dumps.parse_connected_network),
    "contacts": AndroidQuery(read=_contacts),
    "sent_messages": AndroidQuery(read=_sent_messages),
    "calls": AndroidQuery(read=_calls),
    "num_photos": AndroidQuery(read=_num_photos),
    "app_installed": AndroidQuery(read=_app_installed, argument="package"),
    "app_permission": AndroidQuery(read=_app_permission, argument="package/permission"),
    "app_notifications": AndroidQuery(read=_app_notifications, argument="package"),
    "file_exists": AndroidQuery(read=_file_exists, argument="path"),
    "known_network": AndroidQuery(read=_wifi_known, argument="name"),
}
"""Everything that can be read without root and without knowing who made the phone."""

UNREADABLE: Mapping[str, str] = {
    "current_screen": "Android tells the activity in front, not which page of it shows",
    "home_page": "launchers do not tell which page they show",
    "focused_field": "apps do not tell the shell where the cursor is",
    "draft_text": "apps keep what is being typed to themselves",
    "note_texts": "apps keep their notes to themselves",
    "threads": "received messages do not tell conversations apart; ask for sent_messages",
    "playing_track": "tracks have no numbers on a real phone",
    "calculation": "the calculator keeps its display to itself",
}
