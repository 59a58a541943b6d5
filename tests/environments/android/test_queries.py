"""Reading a real phone's state: the formats of Android 13 to 15, what they mean, and what is refused."""

import json

import pytest

from cua_rl.environments.android.queries import ANDROID_QUERIES, UNREADABLE, read_android_query
from cua_rl.environments.phone.simulator.queries import LOOKUPS, QUERIES
from cua_rl.types.errors import DeviceError, TaskError
from tests.environments.android.phone_double import (
    CAMERA,
    HOME,
    PICTURES,
    SENT,
    VERSIONS,
    PhoneDouble,
    Version,
    output,
)

every_version = pytest.mark.parametrize("version", VERSIONS)


@every_version
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("current_app", "com.android.settings"),
        ("current_activity", "com.android.settings/com.android.settings.Settings"),
        ("is_home_screen", "false"),
        ("recent_apps", '["com.example.mail", "com.android.settings"]'),
        ("screen_on", "true"),
        ("wifi_enabled", "true"),
        ("bluetooth_enabled", "true"),
        ("airplane_mode", "false"),
        ("dark_theme_enabled", "false"),
        ("battery_saver_enabled", "false"),
        ("location_enabled", "true"),
        ("dnd_enabled", "false"),
        ("auto_rotate_enabled", "true"),
        ("auto_time_enabled", "true"),
        ("developer_options", "false"),
        ("usb_debugging", "true"),
        ("call_vibration", "false"),
        ("brightness_level", "102"),
        ("screen_timeout", "30000"),
        ("media_volume", "5"),
        ("battery_level", "57"),
        ("clock", "09:05"),
        ("system_language", "English"),
        ("time_zone", "New York"),
        ("is_alarm_on:07:00", "true"),
        ("is_alarm_on:08:00", "false"),
        ("brightness_is_about:40", "true"),
        ("brightness_is_about:50", "false"),
        ("media_volume_is_about:33", "true"),
        ("media_volume_is_about:50", "false"),
        (f"app_running:{CAMERA}", "true"),
        ("app_running:com.example", "false"),
        ("installed_apps", '["android", "com.android.settings", "com.example.camera"]'),
        ("called_numbers", "[]"),
        ("contact_number:Emma", ""),
        ("num_screenshots", "0"),
        ("notification_count", "0"),
        ("alarms_on", '["07:00", "09:30"]'),
        ("connected_wifi", "Home Fibre"),
        ("saved_wifi", "[]"),
        ("contacts", "[]"),
        ("sent_messages", "[]"),
        ("calls", "[]"),
        ("num_photos", "0"),
        (f"app_installed:{CAMERA}", "true"),
        ("app_installed:com.example.absent", "false"),
        (f"app_permission:{CAMERA}/android.permission.CAMERA", "false"),
        (f"app_permission:{CAMERA}/INTERNET", "true"),
        ("app_permission:com.example.absent/CAMERA", "false"),
        (f"app_notifications:{CAMERA}", "true"),
        ("file_exists:/sdcard/Download", "true"),
        ("file_exists:/sdcard/Download/logo.svg", "false"),
        ("wifi_saved:Home Fibre", "false"),
    ],
)
async def test_what_a_phone_prints_is_read_on_every_version(version: Version, name: str, value: str) -> None:
    assert await read_android_query(PhoneDouble(version), name) == value


@every_version
async def test_every_query_refuses_garbage_instead_of_answering(version: Version) -> None:
    class Mute:
        def __init__(self, text: str) -> None:
            self.text = text

        async def run(self, command: str) -> str:
            return self.text

    arguments = {
        "brightness_is_about": ":50",
        "media_volume_is_about": ":50",
        "app_permission": f":{CAMERA}/CAMERA",
        "file_exists": ":/sdcard/a",
    }
    for name, query in ANDROID_QUERIES.items():
        full_name = name + arguments.get(name, f":{CAMERA}" if query.argument else "")
        for text in (
            "",
            "cmd: Can't find service: wifi\n",
            "Error: java.lang.SecurityException: no\n  at a.b(C.java)\n",
        ):
            with pytest.raises(DeviceError):
                await read_android_query(Mute(text), full_name)


def test_queries_that_a_real_phone_does_not_answer_are_the_simulated_phones_own() -> None:
    assert ANDROID_QUERIES.keys() & UNREADABLE.keys() == set()
    assert UNREADABLE.keys() <= {*QUERIES, *LOOKUPS}


@pytest.mark.parametrize(
    ("setting", "value", "query", "answer"),
    [
        ("global wifi_on", "2", "wifi_enabled", "true"),
        ("global wifi_on", "3", "wifi_enabled", "false"),
        ("global zen_mode", "null", "dnd_enabled", "false"),
        ("global zen_mode", "0", "dnd_enabled", "false"),
        ("global zen_mode", "1", "dnd_enabled", "true"),
        ("global zen_mode", "3", "dnd_enabled", "true"),
        ("global low_power", "1", "battery_saver_enabled", "true"),
        ("secure location_mode", "0", "location_enabled", "false"),
        ("system system_locales", "de-CH,en-US", "system_language", "Deutsch"),
        ("system system_locales", "rm-CH", "system_language", "rm-CH"),
        ("system ring_vibration_intensity", "2", "call_vibration", "true"),
        ("system ring_vibration_intensity", "0", "call_vibration", "false"),
        ("system vibrate_when_ringing", "1", "call_vibration", "true"),
    ],
)
async def test_values_of_settings_mean_what_android_means(setting: str, value: str, query: str, answer: str) -> None:
    phone = PhoneDouble()
    phone.settings[setting] = value

    assert await read_android_query(phone, query) == answer


@pytest.mark.parametrize(("setting", "query"), [("global airplane_mode_on", "airplane_mode"),
                                               ("system screen_brightness", "brightness_level"),
                                               ("global wifi_on", "wifi_enabled")])  # fmt: skip
async def test_an_unset_setting_without_a_known_default_is_a_fault(setting: str, query: str) -> None:
    phone = PhoneDouble()
    phone.settings[setting] = "null"

    with pytest.raises(DeviceError, match="null"):
        await read_android_query(phone, query)


async def test_all_vibration_off_silences_calls() -> None:
    phone = PhoneDouble()
    phone.settings |= {"system vibrate_on": "0", "system ring_vibration_intensity": "2"}

    assert await read_android_query(phone, "call_vibration") == "false"


@every_version
async def test_home_is_home_only_while_nothing_lies_over_it(version: Version) -> None:
    phone = PhoneDouble(version)
    phone.foreground = HOME
    assert await read_android_query(phone, "is_home_screen") == "true"
    assert await read_android_query(phone, "current_app") == "com.example.launcher"

    phone.window = "Window{1a u0 NotificationShade}"
    assert await read_android_query(phone, "is_home_screen") == "false"
    assert await read_android_query(phone, "current_app") == "com.example.launcher"


@every_version
@pytest.mark.parametrize(
    ("mode", "shown", "answer"),
    [("yes", True, "true"), ("no", False, "false"), ("auto", True, "true"), ("custom_schedule", False, "false")],
)
async def test_the_theme_is_what_is_set_or_what_the_schedule_shows(
    version: Version, mode: str, shown: bool, answer: str
) -> None:
    phone = PhoneDouble(version)
    phone.night, phone.shown_night = mode, shown

    assert await read_android_query(phone, "dark_theme_enabled") == answer


@every_version
async def test_only_clearable_notifications_of_apps_count_and_a_group_counts_its_members(version: Version) -> None:
    phone = PhoneDouble(version)
    phone.notifications = output("notification_record", version)
    assert await read_android_query(phone, "notification_count") == "1"

    # one mail, two chats whose summary does not count, one summary that stands alone
    phone.notifications += output("notification_group", version)
    assert await read_android_query(phone, "notification_count") == "4"


async def test_a_phone_without_any_notification_has_none() -> None:
    class Empty:
        async def run(self, command: str) -> str:
            return "Current Notification Manager state:\n  mArchive=Archive (0 notifications)\n"

    assert await read_android_query(Empty(), "notification_count") == "0"


@every_version
async def test_permissions_of_a_shared_user_belong_to_its_packages(version: Version) -> None:
    class Shared(PhoneDouble):
        async def run(self, command: str) -> str:
            if command == "dumpsys package com.example.phone":
                return output("package_shared", version)
            return await super().run(command)

    phone = Shared(version)
    phone.packages.add("com.example.phone")

    assert await read_android_query(phone, "app_permission:com.example.phone/READ_CONTACTS") == "true"
    assert await read_android_query(phone, "app_permission:com.example.phone/CAMERA") == "false"


async def test_the_name_of_a_package_is_matched_as_a_whole() -> None:
    phone = PhoneDouble()
    phone.packages.add("com.example.camera2")
    phone.packages.remove(CAMERA)

    assert await read_android_query(phone, f"app_installed:{CAMERA}") == "false"


async def test_saved_networks_are_read_with_spaces_in_their_names() -> None:
    phone = PhoneDouble()
    phone.networks = ["Home Fibre", "Cafe"]

    assert json.loads(await read_android_query(phone, "saved_wifi")) == ["Home Fibre", "Cafe"]
    assert await read_android_query(phone, "wifi_saved:Home Fibre") == "true"


async def test_sent_messages_name_the_contact_and_keep_commas_and_line_breaks() -> None:
    phone = PhoneDouble()
    phone.contacts = {3: ("Emma", "0555-0123"), 4: ("Ben", "555 9999 99")}
    phone.rows[SENT] = (
        "Row: 0 address=+41 555 01 23, body=Running late, sorry\nRow: not a row\nRow: 1 address=12345, body=STOP\n"
    )

    assert json.loads(await read_android_query(phone, "sent_messages")) == [
        {"to": "Emma", "text": "Running late, sorry\nRow: not a row"},
        {"to": "12345", "text": "STOP"},
    ]


async def test_calls_contacts_and_pictures_are_rows() -> None:
    phone = PhoneDouble()
    phone.calls = ["555-0123", "*100#"]
    phone.contacts = {3: ("Emma", "555 0123"), 5: ("NULL", "911")}
    phone.rows[PICTURES] = (
        "Row: 0 relative_path=DCIM/Camera/\nRow: 1 relative_path=DCIM/Screenshots/\n"
        "Row: 2 relative_path=Pictures/Screenshots/\nRow: 3 relative_path=Download/\n"
    )

    assert await read_android_query(phone, "calls") == '["555-0123", "*100#"]'
    assert await read_android_query(phone, "called_numbers") == '["5550123", "*100#"]'
    assert json.loads(await read_android_query(phone, "contacts")) == [["Emma", "555 0123"], ["", "911"]]
    assert await read_android_query(phone, "contact_number:Emma") == "555 0123"
    assert await read_android_query(phone, "contact_digits:Emma") == "5550123"
    assert await read_android_query(phone, "num_photos") == "1"
    assert await read_android_query(phone, "num_screenshots") == "2"


@pytest.mark.parametrize("name", ["note_texts", "wifi_enable", "file_exists", "clock:now", "app_permission:com.a"])
async def test_what_a_real_phone_does_not_answer_is_a_task_error(name: str) -> None:
    with pytest.raises(TaskError, match=name.partition(":")[0]):
        await read_android_query(PhoneDouble(), name)


@pytest.mark.parametrize("path", ["/data/data/com.a/databases/b.db", "/sdcard/../data/a", "Download/a"])
async def test_files_that_adb_may_not_see_are_refused(path: str) -> None:
    with pytest.raises(TaskError, match="/sdcard"):
        await read_android_query(PhoneDouble(), f"file_exists:{path}")


async def test_a_file_that_may_not_be_read_is_neither_there_nor_not() -> None:
    class Forbidden:
        async def run(self, command: str) -> str:
            return "ls: /sdcard/a: Permission denied\n"

    with pytest.raises(DeviceError, match="Permission denied"):
        await read_android_query(Forbidden(), "file_exists:/sdcard/a")


async def test_names_from_outside_are_quoted() -> None:
    commands: list[str] = []

    class Listening:
        async def run(self, command: str) -> str:
            commands.append(command)
            return "/sdcard/a'; reboot; '\n"

    await read_android_query(Listening(), "file_exists:/sdcard/a'; reboot; '")

    assert commands == ["""ls -d '/sdcard/a'"'"'; reboot; '"'"'' 2>&1"""]
