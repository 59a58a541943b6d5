"""A real phone as a device: screenshots, gestures, keys and text in Android's words."""

import io
from base64 import b64encode
from pathlib import Path

import pytest
from PIL import Image

from cua_rl.environments.adb.device import ANDROID_ABILITIES, AndroidDevice, build_observation
from cua_rl.environments.device import ActionRejected, Device, ShellDevice
from cua_rl.types.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    LongPress,
    MoveMouse,
    OpenApp,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.errors import DeviceError, TaskError
from tests.environments.android.phone_double import PhoneDouble

SIZE_PX = (200, 400)


def make_png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SIZE_PX, "navy").save(buffer, "PNG")
    return buffer.getvalue()


class Connection(PhoneDouble):
    """A phone that takes down what is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = make_png()
        self.complaint = ""
        self.input_methods = ["com.example.keyboard/.Ime"]
        self.installed: list[str] = []

    async def run(self, command: str) -> str:
        if command.startswith(("input ", "ime enable ", "monkey ")):
            self.commands.append(command)
            return self.complaint
        if command == "ime list -a -s":
            return "".join(f"{name}\n" for name in self.input_methods)
        if command == "settings get secure default_input_method":
            return f"{self.input_methods[0]}\n"
        if command.startswith("cmd package query-activities"):
            return "2 activities found:\n  com.android.settings/.Settings\n  com.google.android.deskclock/.DeskClock\n"
        return await super().run(command)

    async def screenshot(self) -> bytes:
        return self.picture

    async def load_snapshot(self, name: str) -> None:
        self.commands.append(f"load {name}")

    async def install(self, apk: Path) -> None:
        self.installed.append(f"{apk.name}: {apk.read_text()}")


def make_device(connection: Connection | None = None) -> AndroidDevice:
    return AndroidDevice(connection or Connection(), device_id="emulator-5554", settle_s=0.0)


def test_it_is_a_device_with_a_shell() -> None:
    device: Device = make_device()

    assert isinstance(device, ShellDevice)
    assert device.kind == "android"
    assert ANDROID_ABILITIES.has_shell
    assert "wifi_enabled" in (ANDROID_ABILITIES.queries or ())


async def test_a_screenshot_has_its_size_and_loses_warnings_before_it() -> None:
    connection = Connection()
    connection.picture = b"[Warning] Multiple displays were found, but no display id was specified!\n" + make_png()

    observation = await make_device(connection).observe()

    assert (observation.width_px, observation.height_px) == SIZE_PX
    assert observation.data == make_png()


@pytest.mark.parametrize("data", [b"", b"error: closed\n", make_png()[:20], make_png()[:-8]])
def test_half_a_picture_or_none_is_a_device_error(data: bytes) -> None:
    with pytest.raises(DeviceError, match="PNG"):
        build_observation(data)


@pytest.mark.parametrize(
    ("action", "command"),
    [
        (Click(x=10, y=20), "input tap 10 20"),
        (DoubleClick(x=10, y=20), "input tap 10 20 && input tap 10 20"),
        (LongPress(x=10, y=20), "input swipe 10 20 10 20 1000"),
        (Drag(x=10, y=20, to_x=100, to_y=200), "input swipe 10 20 100 200 300"),
        # 100 px around the middle, the finger going up
        (Scroll(x=100, y=200, down_px=100), "input swipe 100 250 100 150 600"),
        (Scroll(x=100, y=200, down_px=-100), "input swipe 100 150 100 250 600"),
        (Scroll(x=100, y=200, right_px=50), "input swipe 125 200 75 200 600"),
        # never from the outer tenth: 40 to 359 of 400 rows
        (Scroll(x=100, y=5, down_px=1000), "input swipe 100 359 100 40 600"),
        (PressButton(button=Button.RECENTS), "input keyevent KEYCODE_APP_SWITCH"),
        (PressKey(keys=("enter",)), "input keyevent KEYCODE_ENTER"),
        (PressKey(keys=("Ctrl", "a")), "input keycombination KEYCODE_CTRL_LEFT KEYCODE_A"),
        (TypeText(text="Buy bread"), "input text Buy%sbread"),
        (TypeText(text="it's $5; ok?"), "input text 'it'\"'\"'s%s$5;%sok?'"),
        (TypeText(text="100%sure"), "input text 100% && input text sure"),
        (TypeText(text="a\nb\t"), "input text a && input keyevent KEYCODE_ENTER && input text b"
                                  " && input keyevent KEYCODE_TAB"),
    ],
)  # fmt: skip
async def test_actions_become_input_commands(action: Action, command: str) -> None:
    connection = Connection()

    await make_device(connection).execute(action)

    assert connection.commands == [command]


@pytest.mark.parametrize(
    "action",
    [
        Click(x=200, y=0),
        Click(x=0, y=-1),
        Drag(x=0, y=0, to_x=0, to_y=400),
        Scroll(x=100, y=200),
        RightClick(x=1, y=1),
        MoveMouse(x=1, y=1),
        OpenApp(name="Chrome"),
        PressKey(keys=("hyper",)),
        PressKey(keys=()),
        TypeText(text=""),
        TypeText(text="naïve"),
        TypeText(text="好"),
    ],
)
async def test_what_the_phone_cannot_do_is_rejected_before_anything_is_sent(action: Action) -> None:
    connection = Connection()

    with pytest.raises(ActionRejected):
        await make_device(connection).execute(action)

    assert connection.commands == []  # looking what the phone has does not count


async def test_any_script_is_typed_where_the_phone_has_a_keyboard_for_it() -> None:
    connection = Connection()
    connection.input_methods.append("com.android.adbkeyboard/.AdbIME")

    await make_device(connection).execute(TypeText(text="naïve 好; rm -rf /"))

    (command,) = connection.commands
    message = b64encode("naïve 好; rm -rf /".encode()).decode()
    assert f"am broadcast -a ADB_INPUT_B64 --es msg {message} " in command
    assert command.endswith("ime set com.example.keyboard/.Ime >/dev/null")  # the user's own keyboard again


async def test_apps_are_opened_by_their_names_and_installed_from_files(tmp_path: Path) -> None:
    connection = Connection()
    device = make_device(connection)
    apk = tmp_path / "notes.apk"
    apk.write_text("an app")

    await device.execute(OpenApp(name="Desk Clock"))
    await device.install_app(str(apk))
    await device.open_app("com.example; reboot")

    assert connection.commands == [
        "monkey -p com.google.android.deskclock -c android.intent.category.LAUNCHER 1 >/dev/null 2>&1",
        "monkey -p 'com.example; reboot' -c android.intent.category.LAUNCHER 1",
    ]
    assert connection.installed == ["notes.apk: an app"]


async def test_an_input_command_that_complains_is_a_device_error() -> None:
    connection = Connection()
    connection.complaint = "java.lang.SecurityException: Injecting input events requires INJECT_EVENTS\n"

    with pytest.raises(DeviceError, match="INJECT_EVENTS"):
        await make_device(connection).execute(Click(x=1, y=1))


async def test_input_that_the_phone_refuses_is_told_to_the_model_if_it_takes_other_input() -> None:
    class Choosy(Connection):
        async def run(self, command: str) -> str:
            said = await super().run(command)
            return "Error: Invalid arguments for command: text\n" if command.startswith("input text") else said

    with pytest.raises(ActionRejected, match="Invalid arguments"):
        await make_device(Choosy()).execute(TypeText(text="-x"))


async def test_waiting_sends_nothing_queries_are_read_and_the_shell_is_open() -> None:
    connection = Connection()
    device = make_device(connection)

    await device.execute(Wait(duration_s=0.0))
    assert connection.commands == []
    assert await device.query("wifi_enabled") == "true"
    assert await device.shell("settings get global wifi_on") == "1\n"
    with pytest.raises(TaskError, match="note_texts"):
        await device.query("note_texts")


async def test_a_closed_phone_does_nothing_more() -> None:
    device = make_device()
    await device.close()
    await device.close()

    with pytest.raises(DeviceError, match="closed"):
        await device.observe()
    with pytest.raises(DeviceError, match="closed"):
        await device.execute(Click(x=1, y=1))
