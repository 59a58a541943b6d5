"""Bringing a real phone into a state where a goal does not hold, so that reaching it is the agent's work."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from posixpath import dirname
from shlex import quote
from typing import Literal, cast

from cua_rl.devices.android.package_queries import NOTIFY_PERMISSION, full_permission, read_permissions
from cua_rl.devices.android.queries import (
    MEDIA_VOLUME,
    read_android_query,
    read_home_activity,
    split_query,
)
from cua_rl.devices.android.readings import parse_volume
from cua_rl.devices.android.shell import AndroidShell
from cua_rl.errors import TaskError

_WAKE = "input keyevent KEYCODE_WAKEUP; wm dismiss-keyguard; cmd statusbar collapse"
_GO_HOME = "input keyevent KEYCODE_HOME"
_OPEN_SETTINGS = "am start -a android.settings.SETTINGS"
_OWN_BRIGHTNESS = "settings put system screen_brightness_mode 0; "
"""Or the phone's own idea of the right brightness moves it back."""
_NOTIFY = "cmd notification post -t Reminder cua_rl_$(date +%s%N) 'Water the plants'"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A goal that must not hold; `argument` is what follows the colon of the query."""

    shell: AndroidShell
    query: str
    argument: str
    expected: str
    how: str

    async def holds(self) -> bool:
        """Whether the goal is met; raises `TaskError` for a kind of goal that is none."""
        actual = await read_android_query(self.shell, self.query)
        match self.how:
            case "equals":
                return actual == self.expected
            case "includes":
                return self._item(self.expected) in self._items(actual)
            case _:
                raise TaskError(f"expected how to be 'equals', 'includes' or 'told', got {self.how!r}")

    def _item(self, text: str) -> object:
        try:
            return loads(text)
        except JSONDecodeError as error:
            raise TaskError(f"expected JSON to look for in {self.query!r}, got {text!r}") from error

    def _items(self, text: str) -> list[object]:
        items = self._item(text)
        if not isinstance(items, list):
            raise TaskError(f"expected {self.query!r} to be a list to look for {self.expected!r} in, got {text!r}")
        return cast("list[object]", items)

    @property
    def opposite(self) -> str:
        """What a switch must say instead; raises `TaskError` if it is expected to be neither "true" nor "false"."""
        if self.expected not in ("true", "false"):
            raise TaskError(f"expected {self.query!r} to be wanted as 'true' or 'false', got {self.expected!r}")
        return "false" if self.expected == "true" else "true"


_Step = Callable[[_Wish], Awaitable[str]]
"""Does something to the phone and returns what it printed, for error messages."""


async def _nothing(wish: _Wish) -> str:
    return ""


def _refuse(advice: str) -> _Step:
    async def refuse(wish: _Wish) -> str:
        raise TaskError(
            f"expected a phone on which {wish.query!r} is anything but {wish.expected!r}, got one where it is; {advice}"
        )

    return refuse


_LEAVE_IT = _refuse("change it by hand, there is no way to do it over adb")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preparation:
    """`require` runs first and raises `TaskError` if the task is impossible; `undo` runs if the goal holds.

    `is_place`: the goal is about what is in front, which may be the home screen itself. `battery` is what the phone is
    told about its charger: the battery saver cannot be switched on while charging.
    """

    undo: _Step = _LEAVE_IT
    require: _Step = _nothing
    is_place: bool = False
    battery: Literal["reset", "unplug"] = "reset"


async def make_goal_false(
    shell: AndroidShell, query: str, expected: str, how: str, *, timeout_s: float = 15.0, poll_s: float = 0.5
) -> None:
    """Wake the phone, undo the goal if it holds, go to the home screen, and verify both by reading.

    `how` is "equals", "includes" (a JSON list must not have the JSON item `expected`) or "told" (a question: nothing is
    undone, but its answer must be readable). A goal to be at home starts in Settings. Nothing of the user's is deleted
    but the file or empty folder that a file task names.

    Raises `TaskError` if the goal cannot be made false or still holds after `timeout_s`, `DeviceError` if the phone
    fails.
    """
    base, argument = split_query(query)
    wish = _Wish(shell=shell, query=query, argument=argument, expected=expected, how=how)
    preparation = _QUESTION if how == "told" else _PREPARATIONS.get(base, _Preparation())
    await shell.run(f"{_WAKE}; cmd battery {preparation.battery}")
    await preparation.require(wish)
    said = await preparation.undo(wish) if how != "told" and await wish.holds() else ""
    if preparation.is_place:
        said += await _leave(wish)
    else:
        await shell.run(_GO_HOME)
        await _wait_until(lambda: _is_home(shell), "the home screen (is the phone locked?)", timeout_s, poll_s)
    if how != "told":
        wanted = f"{query!r} to be anything but {expected!r} (the phone said {said.strip()!r})"
        await _wait_until(lambda: _is_undone(wish), wanted, timeout_s, poll_s)


async def _is_home(shell: AndroidShell) -> bool:
    return await read_android_query(shell, "is_home_screen") == "true"


async def _is_undone(wish: _Wish) -> bool:
    return not await wish.holds()


async def _wait_until(condition: Callable[[], Awaitable[bool]], wanted: str, timeout_s: float, poll_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() >= deadline:
            raise TaskError(f"expected {wanted} within {timeout_s:g} s of preparing the phone, it did not come")
        await asyncio.sleep(poll_s)


async def _leave(wish: _Wish) -> str:
    """Go home, or to Settings if home is where the goal wants the phone."""
    home = await read_home_activity(wish.shell)
    is_home_wanted = wish.expected in (home, home.partition("/")[0])
    if wish.query == "is_home_screen":
        is_home_wanted = wish.opposite == "false"
    return await wish.shell.run(_OPEN_SETTINGS if is_home_wanted else _GO_HOME)


async def _read_answer(wish: _Wish) -> str:
    return await read_android_query(wish.shell, wish.query)


def _switch(command: str, on: str, off: str) -> _Step:
    """`command` with ON in place of the braces turns the switch on."""

    async def switch(wish: _Wish) -> str:
        return await wish.shell.run(command.format(on if wish.opposite == "true" else off))

    return switch


def _setting_switch(namespace: str, key: str) -> _Step:
    return _switch(f"settings put {namespace} {key} {{}}", "1", "0")


def _setting_number(namespace: str, key: str, *choices: str, first: str = "") -> _Step:
    """Set the first choice that is not wanted."""

    async def put(wish: _Wish) -> str:
        value = next(choice for choice in choices if choice != wish.expected)
        return await wish.shell.run(f"{first}settings put {namespace} {key} {value}")

    return put


async def _set_volume(wish: _Wish) -> str:
    _, minimum, maximum = parse_volume(await wish.shell.run(MEDIA_VOLUME))
    middle = (minimum + maximum) // 2
    level = middle if str(middle) != wish.expected else middle + 1
    return await wish.shell.run(f"cmd media_session volume --stream 3 --set {level}")


async def _move_brightness(wish: _Wish) -> str:
    level = "230" if int(wish.argument) < 50 else "25"
    return await wish.shell.run(f"{_OWN_BRIGHTNESS}settings put system screen_brightness {level}")


async def _move_volume(wish: _Wish) -> str:
    _, minimum, maximum = parse_volume(await wish.shell.run(MEDIA_VOLUME))
    level = maximum if int(wish.argument) < 50 else minimum
    return await wish.shell.run(f"cmd media_session volume --stream 3 --set {level}")


async def _move_time_zone(wish: _Wish) -> str:
    zone = "Europe/London" if wish.expected != "London" else "Asia/Tokyo"
    return await wish.shell.run(f"settings put global auto_time_zone 0; cmd alarm set-timezone {zone}")


async def _switch_app(wish: _Wish) -> str:
    package = quote(wish.argument)
    if wish.opposite == "true":
        return await wish.shell.run(f"monkey -p {package} -c android.intent.category.LAUNCHER 1")
    return await wish.shell.run(f"am force-stop {package}")


async def _post_notification(wish: _Wish) -> str:
    return await wish.shell.run(_NOTIFY)


async def _require_permission(wish: _Wish) -> str:
    package, permission = _permission(wish)
    granted = await read_permissions(wish.shell, package)
    if granted is None:
        raise TaskError(f"expected {package!r} to be installed for {wish.query!r}; install it: adb install FILE")
    if permission not in granted:
        raise TaskError(f"expected {package!r} to ask for the permission {permission!r}, it does not: {wish.query!r}")
    return ""


async def _switch_permission(wish: _Wish) -> str:
    package, permission = _permission(wish)
    verb = "grant" if wish.opposite == "true" else "revoke"
    return await wish.shell.run(f"pm {verb} --user 0 {quote(package)} {quote(permission)}")


def _permission(wish: _Wish) -> tuple[str, str]:
    package, _, permission = wish.argument.partition("/")
    return package, full_permission(permission) if permission else NOTIFY_PERMISSION


async def _refuse_installed(wish: _Wish) -> str:
    if wish.opposite == "true":
        return await _refuse(f"install it before the task removes it: adb install {wish.argument}.apk")(wish)
    return await _refuse("uninstalling it here would delete its data: do it by hand")(wish)


async def _swap_file(wish: _Wish) -> str:
    path = quote(wish.argument)
    if wish.opposite == "false":
        return await wish.shell.run(f"if [ -d {path} ]; then rmdir {path}; else rm -f {path}; fi")
    if wish.argument.endswith("/"):
        return await wish.shell.run(f"mkdir -p {path}")
    return await wish.shell.run(f"mkdir -p {quote(dirname(wish.argument))} && touch {path}")


async def _swap_network(wish: _Wish) -> str:
    if wish.opposite == "false":
        return await _refuse("forgetting it here would lose its password: do it by hand")(wish)
    return await wish.shell.run(f"cmd wifi add-network {quote(wish.argument)} open")


async def _require_adb(wish: _Wish) -> str:
    if wish.query == "usb_debugging" or wish.opposite == "true":
        raise TaskError(
            f"expected a goal that leaves adb alone, got {wish.query!r} {wish.expected!r}: without USB debugging the "
            "phone can be neither prepared nor checked; run this task on the simulated phone"
        )
    return ""


async def _set_ring_vibration(wish: _Wish) -> str:
    keys = ("ring_vibration_intensity", "vibrate_when_ringing")
    puts = "; ".join(f"settings put system {key} {{0}}" for key in keys)
    return await _switch(f"settings put system vibrate_on 1; {puts}", "1", "0")(wish)


_QUESTION = _Preparation(undo=_nothing, require=_read_answer)
_PLACE = _Preparation(undo=_nothing, is_place=True)
_PREPARATIONS: Mapping[str, _Preparation] = {
    "current_app": _PLACE,
    "current_activity": _PLACE,
    "is_home_screen": _PLACE,
    "wifi_enabled": _Preparation(undo=_switch("svc wifi {}", "enable", "disable")),
    "bluetooth_enabled": _Preparation(undo=_switch("svc bluetooth {}", "enable", "disable")),
    "airplane_mode": _Preparation(undo=_switch("cmd connectivity airplane-mode {}", "enable", "disable")),
    "dark_theme_enabled": _Preparation(undo=_switch("cmd uimode night {}", "yes", "no")),
    "battery_saver_enabled": _Preparation(undo=_switch("cmd power set-mode {}", "1", "0"), battery="unplug"),
    "location_enabled": _Preparation(undo=_switch("cmd location set-location-enabled {} --user 0", "true", "false")),
    "dnd_enabled": _Preparation(undo=_switch("cmd notification set_dnd {}", "on", "off")),
    "auto_rotate_enabled": _Preparation(undo=_setting_switch("system", "accelerometer_rotation")),
    "auto_time_enabled": _Preparation(undo=_setting_switch("global", "auto_time")),
    "developer_options": _Preparation(
        undo=_setting_switch("global", "development_settings_enabled"), require=_require_adb
    ),
    "usb_debugging": _Preparation(require=_require_adb),
    "call_vibration": _Preparation(undo=_set_ring_vibration),
    "brightness_level": _Preparation(
        undo=_setting_number("system", "screen_brightness", "128", "64", first=_OWN_BRIGHTNESS)
    ),
    "brightness_is_about": _Preparation(undo=_move_brightness),
    "screen_timeout": _Preparation(undo=_setting_number("system", "screen_off_timeout", "60000", "120000")),
    "media_volume": _Preparation(undo=_set_volume),
    "media_volume_is_about": _Preparation(undo=_move_volume),
    "time_zone": _Preparation(undo=_move_time_zone),
    "notification_count": _Preparation(undo=_post_notification),
    "app_installed": _Preparation(undo=_refuse_installed),
    "app_running": _Preparation(undo=_switch_app),
    "app_permission": _Preparation(undo=_switch_permission, require=_require_permission),
    "app_notifications": _Preparation(undo=_switch_permission, require=_require_permission),
    "file_exists": _Preparation(undo=_swap_file),
    "wifi_saved": _Preparation(undo=_swap_network),
}
