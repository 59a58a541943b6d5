"""Preparing a real phone: the goal does not hold, the phone is at home, nothing of the user's is lost."""

import pytest

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.queries import read_android_query
from cua_rl.types.errors import DeviceError, TaskError
from tests.environments.android.phone_double import (
    CAMERA,
    HOME,
    PICTURES,
    SENT,
    SETTINGS,
    VERSIONS,
    PhoneDouble,
    Version,
)

SWITCHES = [
    "wifi_enabled",
    "bluetooth_enabled",
    "airplane_mode",
    "dark_theme_enabled",
    "battery_saver_enabled",
    "location_enabled",
    "dnd_enabled",
    "auto_rotate_enabled",
    "auto_time_enabled",
    "call_vibration",
    f"app_running:{CAMERA}",
    f"app_permission:{CAMERA}/CAMERA",
    f"app_notifications:{CAMERA}",
    "file_exists:/sdcard/Download/abc",
    "file_exists:/sdcard/Download/logos/",
]


async def prepare(phone: PhoneDouble, query: str, expected: str, how: str = "equals") -> None:
    await make_goal_false(phone, query, expected, how, timeout_s=0.05, poll_s=0.0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("query", SWITCHES)
async def test_a_switch_is_turned_to_both_sides(version: Version, query: str) -> None:
    phone = PhoneDouble(version)
    for expected, opposite in (("true", "false"), ("false", "true"), ("true", "false")):
        await prepare(phone, query, expected)

        assert await read_android_query(phone, query) == opposite
        assert phone.foreground == HOME


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("brightness_level", ("255", "128", "64")),
        ("screen_timeout", ("30000", "60000", "120000")),
        ("media_volume", ("0", "5", "7", "15")),
        ("notification_count", ("0", "1")),
        ("time_zone", ("New York", "London", "Tokyo")),
        ("brightness_is_about:40", ("true",)),
        ("brightness_is_about:80", ("true",)),
        ("media_volume_is_about:30", ("true",)),
        ("media_volume_is_about:90", ("true",)),
    ],
)
async def test_a_number_is_moved_away_from_every_goal(query: str, values: tuple[str, ...]) -> None:
    phone = PhoneDouble()
    for value in values:
        await prepare(phone, query, value)

        assert await read_android_query(phone, query) != value


async def test_what_does_not_hold_is_left_as_it_is() -> None:
    phone = PhoneDouble()

    await prepare(phone, "brightness_level", "255")

    assert phone.settings["system screen_brightness"] == "102"
    assert phone.foreground == HOME


async def test_the_battery_saver_is_prepared_off_the_charger_and_everything_else_on_it() -> None:
    phone = PhoneDouble()
    await prepare(phone, "battery_saver_enabled", "false")
    assert not phone.is_charging
    assert phone.settings["global low_power"] == "1"

    await prepare(phone, "wifi_enabled", "true")
    assert phone.is_charging


@pytest.mark.parametrize(
    ("query", "expected", "start", "end"),
    [
        ("current_app", "com.android.settings", SETTINGS, HOME),
        ("current_app", CAMERA, SETTINGS, HOME),
        ("current_app", "com.example.launcher", HOME, SETTINGS),
        ("current_activity", "com.example.launcher/com.example.launcher.Home", HOME, SETTINGS),
        ("is_home_screen", "true", HOME, SETTINGS),
        ("is_home_screen", "false", SETTINGS, HOME),
    ],
)
async def test_a_goal_about_what_is_in_front_begins_elsewhere(query: str, expected: str, start: str, end: str) -> None:
    phone = PhoneDouble()
    phone.packages.add("com.example.launcher")
    phone.foreground = start

    await prepare(phone, query, expected)

    assert phone.foreground == end


async def test_a_question_needs_a_readable_answer() -> None:
    phone = PhoneDouble()
    await prepare(phone, "battery_level", "", "told")
    await prepare(phone, "contact_number:Emma", "", "told")

    assert phone.foreground == HOME
    assert [name for name, _ in phone.contacts.values()] == ["Emma"]

    with pytest.raises(TaskError, match="note_texts"):
        await prepare(phone, "note_texts", "", "told")


@pytest.mark.parametrize(
    ("query", "expected", "advice"),
    [
        ("app_installed:com.example.absent", "false", "install it before the task removes it"),
        (f"app_installed:{CAMERA}", "true", "delete its data"),
        ("app_permission:com.example.absent/CAMERA", "true", "install it: adb install"),
        (f"app_permission:{CAMERA}/BODY_SENSORS", "true", "does not"),
        ("usb_debugging", "true", "without USB debugging"),
        ("usb_debugging", "false", "without USB debugging"),
        ("developer_options", "false", "without USB debugging"),
        ("wifi_saved:Cafe", "true", "lose its password"),
        ("battery_level", "57", "by hand"),
        ("home_page", "0", "launchers"),
        ("current_app", "com.example.absent", "makers name their own apps"),
        ("brightness_level", "1", "brightness_is_about:0"),
        ("num_photos", "7", "one picture more than the 0"),
        ("is_alarm_on:07:00", "true", "without other alarms"),
        ("file_exists:/data/data/com.a/b", "true", "/sdcard"),
    ],
)
async def test_what_cannot_be_prepared_is_refused_with_advice(query: str, expected: str, advice: str) -> None:
    phone = PhoneDouble()
    phone.settings["global wifi_on"] = "1"
    phone.networks = ["Cafe"]

    with pytest.raises(TaskError, match=advice):
        await prepare(phone, query, expected)


async def test_a_network_to_forget_is_saved_first_and_developer_options_to_find_are_hidden() -> None:
    phone = PhoneDouble()
    phone.settings["global development_settings_enabled"] = "1"

    await prepare(phone, "wifi_saved:Corner Cafe", "false")
    await prepare(phone, "developer_options", "true")

    assert phone.networks == ["Corner Cafe"]
    assert phone.settings["global development_settings_enabled"] == "0"


async def test_a_message_that_was_sent_already_is_not_deleted() -> None:
    phone = PhoneDouble()
    goal = '{"to": "123", "text": "Hi"}'
    await prepare(phone, "sent_messages", goal, "includes")

    phone.rows[SENT] = "Row: 0 address=123, body=Hi\n"
    with pytest.raises(TaskError, match="by hand"):
        await prepare(phone, "sent_messages", goal, "includes")


async def test_a_folder_with_something_in_it_is_kept() -> None:
    phone = PhoneDouble()
    phone.files = {"/sdcard/Download/abc", "/sdcard/Download/abc/photo.jpg"}

    with pytest.raises(TaskError, match="not empty"):
        await prepare(phone, "file_exists:/sdcard/Download/abc", "true")

    assert phone.files == {"/sdcard/Download/abc", "/sdcard/Download/abc/photo.jpg"}


async def test_a_change_that_does_not_come_is_a_task_error() -> None:
    phone = PhoneDouble()
    phone.foreground, phone.is_stuck = HOME, True

    with pytest.raises(TaskError, match="'wifi_enabled' to be anything but 'true'"):
        await prepare(phone, "wifi_enabled", "true")


async def test_a_phone_that_stays_locked_is_a_task_error() -> None:
    phone = PhoneDouble()
    phone.is_stuck = True

    with pytest.raises(TaskError, match="locked"):
        await prepare(phone, "wifi_enabled", "false")


async def test_a_phone_that_is_gone_is_a_device_error() -> None:
    phone = PhoneDouble()
    phone.is_gone = True

    with pytest.raises(DeviceError, match="gone"):
        await prepare(phone, "wifi_enabled", "true")


async def test_no_command_clears_the_data_of_an_app() -> None:
    phone = PhoneDouble()
    for query in SWITCHES:
        for expected in ("true", "false"):
            await prepare(phone, query, expected)

    assert not [command for command in phone.commands if "pm clear" in command or "uninstall" in command]


async def test_a_contact_to_add_is_removed_only_with_this_very_number() -> None:
    phone = PhoneDouble()
    phone.contacts = {1: ("Emma", "555 0123"), 2: ("Emma", "777"), 3: ("Ben", "555 0123")}

    await prepare(phone, "contact_digits:Emma", "5550123")

    assert phone.contacts == {2: ("Emma", "777"), 3: ("Ben", "555 0123")}


async def test_calls_to_the_number_of_the_task_are_forgotten_and_no_others() -> None:
    phone = PhoneDouble()
    phone.calls = ["555-0123", "5550123", "911"]

    await prepare(phone, "called_numbers", '"5550123"', "includes")

    assert phone.calls == ["911"]


async def test_an_alarm_is_set_or_dismissed_by_the_clock_app() -> None:
    phone = PhoneDouble()
    phone.alarms = ["06:45"]

    await prepare(phone, "is_alarm_on:06:45", "true")
    assert phone.alarms == []

    await prepare(phone, "is_alarm_on:06:45", "false")
    assert phone.alarms == ["06:45"]


async def test_a_picture_to_take_is_the_next_one() -> None:
    phone = PhoneDouble()
    phone.rows[PICTURES] = "Row: 0 relative_path=DCIM/Camera/\n"

    await prepare(phone, "num_photos", "2")

    assert phone.foreground == HOME


async def test_volume_in_steps_needs_a_phone_with_the_steps_of_the_simulated_one() -> None:
    phone = PhoneDouble()
    phone.max_volume = 25

    await prepare(phone, "media_volume", "0")
    with pytest.raises(TaskError, match="media_volume_is_about"):
        await prepare(phone, "media_volume", "15")


async def test_a_network_in_use_is_left_without_forgetting_it() -> None:
    phone = PhoneDouble()
    phone.networks = ["Home Fibre"]

    await prepare(phone, "connected_wifi", "Home Fibre")

    assert phone.settings["global wifi_on"] == "0"
    assert phone.networks == ["Home Fibre"]
