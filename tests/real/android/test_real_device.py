"""An attached Android phone or emulator: every query is understood, switches are prepared, screenshots come.

Run with `make test-android`. Tests that change settings (brightness, theme, volume) run on emulators, and on a phone
only if ANDROID_SERIAL names it.
"""

import os

import pytest

from cua_rl.environments.adb.device import AndroidDevice
from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.queries import ANDROID_QUERIES, read_android_query
from cua_rl.environments.android.shell import AdbShell, list_adb_devices
from cua_rl.types.actions import Button, PressButton
from cua_rl.types.errors import ConfigError, DeviceError

ARGUMENTS = {
    "app_installed": "com.android.settings",
    "app_running": "com.android.settings",
    "app_permission": "com.android.shell/READ_CONTACTS",
    "app_notifications": "com.android.shell",
    "file_exists": "/sdcard/Download",
    "wifi_saved": "No such network",
    "contact_number": "Nobody",
    "contact_digits": "Nobody",
    "is_alarm_on": "07:00",
    "brightness_is_about": "50",
    "media_volume_is_about": "50",
}
SWITCHES = ("dark_theme_enabled", "dnd_enabled", "auto_rotate_enabled", "auto_time_enabled", "call_vibration")


@pytest.fixture
async def shell() -> AdbShell:
    try:
        phones = [phone for phone in await list_adb_devices() if phone.state == "device"]
    except (ConfigError, DeviceError) as error:
        pytest.skip(f"no phone: {error}")
    if not phones:
        pytest.skip("no phone: `adb devices` shows none that can be used")
    wanted = os.environ.get("ANDROID_SERIAL", phones[0].serial)
    return AdbShell(wanted)


@pytest.fixture
def own_shell(shell: AdbShell) -> AdbShell:
    """The shell of a phone that may be changed."""
    if not shell.serial.startswith("emulator-") and os.environ.get("ANDROID_SERIAL") != shell.serial:
        pytest.skip(
            f"no phone to change: {shell.serial} is real; set ANDROID_SERIAL={shell.serial} if its settings may change"
        )
    return shell


@pytest.mark.parametrize("name", ANDROID_QUERIES)
async def test_every_query_is_understood(shell: AdbShell, name: str) -> None:
    full_name = f"{name}:{ARGUMENTS[name]}" if ANDROID_QUERIES[name].argument else name

    assert isinstance(await read_android_query(shell, full_name), str)


@pytest.mark.parametrize("query", SWITCHES)
async def test_switches_are_prepared_to_both_sides(own_shell: AdbShell, query: str) -> None:
    for expected, opposite in (("true", "false"), ("false", "true")):
        await make_goal_false(own_shell, query, expected, "equals")

        assert await read_android_query(own_shell, query) == opposite


async def test_numbers_and_places_are_prepared(own_shell: AdbShell) -> None:
    for query in ("brightness_level", "screen_timeout", "media_volume", "notification_count"):
        value = await read_android_query(own_shell, query)
        await make_goal_false(own_shell, query, value, "equals")
        assert await read_android_query(own_shell, query) != value

    await make_goal_false(own_shell, "is_home_screen", "true", "equals")
    assert await read_android_query(own_shell, "current_app") == "com.android.settings"


async def test_the_phone_shows_itself_and_obeys(own_shell: AdbShell) -> None:
    await make_goal_false(own_shell, "is_home_screen", "true", "equals")
    device = AndroidDevice(own_shell, device_id=own_shell.serial)
    in_settings = await device.observe()

    await device.execute(PressButton(button=Button.HOME))

    assert await device.query("is_home_screen") == "true"
    assert (await device.observe()).sha256 != in_settings.sha256
