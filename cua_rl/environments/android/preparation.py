"""Prepares a real phone so that a goal is not reached yet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from cua_rl.environments.android import steps
from cua_rl.environments.android.queries import read_home_activity, split_query
from cua_rl.environments.android.shell import AndroidShell
from cua_rl.environments.android.steps import Preparation, Wish, nothing, switch, switch_setting
from cua_rl.types.errors import TaskError

_WAKE = "input keyevent KEYCODE_WAKEUP; wm dismiss-keyguard; cmd statusbar collapse"
_GO_HOME = "input keyevent KEYCODE_HOME"
_OPEN_SETTINGS = "am start -a android.settings.SETTINGS"


async def make_goal_false(
    shell: AndroidShell, query: str, expected: str, how: str, *, timeout_s: float = 15.0, poll_s: float = 0.5
) -> None:
    """Wake the phone, undo the goal if it holds, go to the home screen, and verify both by reading.

    `how` is "equals", "includes" (a JSON list must not have the JSON item `expected`) or "told" (a question: there must
    be an answer, and it may not be `expected` yet). A goal to be at home starts in Settings. Nothing of the user's is
    deleted but what the goal names: its file or empty folder, contact, or number in the list of calls.

    Raises `TaskError` if the goal can be neither undone nor reached on this phone, or still holds after `timeout_s`;
    `DeviceError` if the phone fails.
    """
    base, argument = split_query(query)
    wish = Wish(shell=shell, query=query, argument=argument, expected=expected, how=how)
    preparation = PREPARATIONS.get(base, Preparation())
    await shell.run(f"{_WAKE}; cmd battery {preparation.battery}")
    await preparation.require(wish)
    said = await preparation.undo(wish) if await wish.holds() else ""
    if preparation.is_place:
        home = await read_home_activity(shell)
        is_home_wanted = expected in (home, home.partition("/")[0])
        if query == "is_home_screen":
            is_home_wanted = wish.opposite == "false"
        said += await shell.run(_OPEN_SETTINGS if is_home_wanted else _GO_HOME)
    else:
        await shell.run(_GO_HOME)
        at_home = Wish(shell=shell, query="is_home_screen", argument="", expected="true", how="equals")
        await _wait_until(at_home.holds, "the home screen (is the phone locked?)", timeout_s, poll_s)
    wanted = f"{query!r} to be anything but {expected!r} (the phone said {said.strip()!r})"
    await _wait_until(wish.is_undone, wanted, timeout_s, poll_s)


async def _wait_until(condition: Callable[[], Awaitable[bool]], wanted: str, timeout_s: float, poll_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() >= deadline:
            raise TaskError(f"expected {wanted} within {timeout_s:g} s of preparing the phone, it did not happen")
        await asyncio.sleep(poll_s)


def _switch(undo: str, on: str, off: str) -> Preparation:
    return Preparation(undo=switch(undo, on, off))


_APP_IN_FRONT = Preparation(undo=nothing, require=steps.require_app, is_place=True)
_CONTACT = Preparation(undo=steps.swap_contact)
_PERMISSION = Preparation(undo=steps.switch_permission, require=steps.require_permission)
_PICTURES = Preparation(require=steps.require_next_picture)
PREPARATIONS: Mapping[str, Preparation] = {
    "current_app": _APP_IN_FRONT,
    "current_activity": _APP_IN_FRONT,
    "is_home_screen": Preparation(undo=nothing, is_place=True),
    "wifi_enabled": _switch("svc wifi {}", "enable", "disable"),
    "bluetooth_enabled": _switch("svc bluetooth {}", "enable", "disable"),
    "airplane_mode": _switch("cmd connectivity airplane-mode {}", "enable", "disable"),
    "dark_theme_enabled": _switch("cmd uimode night {}", "yes", "no"),
    "battery_saver_enabled": Preparation(undo=switch("cmd power set-mode {}", "1", "0"), battery="unplug"),
    "location_enabled": _switch("cmd location set-location-enabled {} --user 0", "true", "false"),
    "dnd_enabled": _switch("cmd notification set_dnd {}", "on", "off"),
    "auto_rotate_enabled": Preparation(undo=switch_setting("system", "accelerometer_rotation")),
    "auto_time_enabled": Preparation(undo=switch_setting("global", "auto_time")),
    "developer_options": Preparation(
        undo=switch_setting("global", "development_settings_enabled"), require=steps.require_adb
    ),
    "usb_debugging": Preparation(require=steps.require_adb),
    "call_vibration": Preparation(undo=steps.switch_ring_vibration),
    "brightness_level": Preparation(undo=steps.move_brightness, require=steps.require_reachable_brightness),
    "brightness_is_about": Preparation(undo=steps.move_brightness_away),
    "screen_timeout": Preparation(undo=steps.move_screen_timeout),
    "media_volume": Preparation(undo=steps.move_volume, require=steps.require_simulated_volumes),
    "media_volume_is_about": Preparation(undo=steps.move_volume_away),
    "time_zone": Preparation(undo=steps.move_time_zone),
    "notification_count": Preparation(undo=steps.post_notification),
    "app_installed": Preparation(undo=steps.refuse_app),
    "app_running": Preparation(undo=steps.switch_app),
    "app_permission": _PERMISSION,
    "app_notifications": _PERMISSION,
    "file_exists": Preparation(undo=steps.swap_file),
    "contact_number": _CONTACT,
    "contact_digits": _CONTACT,
    "called_numbers": Preparation(undo=steps.forget_calls),
    "is_alarm_on": Preparation(undo=steps.swap_alarm, require=steps.require_lone_alarm),
    "num_photos": _PICTURES,
    "num_screenshots": _PICTURES,
    "wifi_saved": Preparation(undo=steps.swap_network),
    # without Wi-Fi there is no connection, and no password is lost
    "connected_wifi": Preparation(undo=lambda wish: wish.shell.run("svc wifi disable")),
}
"""Goals on any other query are rejected if they already hold."""
