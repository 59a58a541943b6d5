"""The real gbox-sdk against a server that behaves as GBox says."""

from pathlib import Path

import pytest

from cua_rl.environments.device import ActionRejected, ShellDevice
from cua_rl.environments.gbox.device import Capture, GboxDevice
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
from cua_rl.types.errors import DeviceError, DeviceLostError, DeviceQuotaError, DeviceServiceError, TaskError
from tests.doubles.gbox_desktop import NOTE
from tests.doubles.gbox_phone import PhoneBox
from tests.doubles.gbox_service import GboxService
from tests.fakes import make_task


async def lend(gbox: GboxService, box_type: str = "android", **changes: object) -> GboxDevice:
    backend = gbox.backend_with(box_type=box_type, **changes)
    await backend.__aenter__()
    device = await backend.make(make_task().device_request())
    assert isinstance(device, GboxDevice)
    return device


def phone_of(gbox: GboxService) -> PhoneBox:
    (box,) = gbox.double.boxes.values()
    assert isinstance(box.inside, PhoneBox)
    return box.inside


async def test_an_action_and_its_screenshot_are_one_call(gbox: GboxService) -> None:
    device = await lend(gbox)
    before = await device.observe()  # taken when the box was made
    x, y = phone_of(gbox).elements()["settings"]

    await device.execute(Click(x=x, y=y))
    after = await device.observe()

    assert (before.width_px, before.height_px) == (192, 320)
    assert after.sha256 != before.sha256
    assert phone_of(gbox).state.app == "settings"
    assert gbox.double.requests["POST boxes/actions/screenshot"] == 1
    assert (await device.observe()).sha256 == after.sha256  # looking again takes a new one
    assert gbox.double.requests["POST boxes/actions/screenshot"] == 2


WORDS: list[tuple[str, Action, str, dict[str, object]]] = [
    ("android", Click(x=1, y=2), "tap", {"x": 1, "y": 2}),
    ("android", DoubleClick(x=1, y=2), "click", {"x": 1, "y": 2, "double": True}),
    ("android", LongPress(x=1, y=2, duration_s=1.5), "long-press", {"x": 1, "y": 2, "duration": "1500ms"}),
    ("android", Drag(x=1, y=2, to_x=3, to_y=4), "swipe", {"start": {"x": 1, "y": 2}, "end": {"x": 3, "y": 4}}),
    ("android", Scroll(x=1, y=2, down_px=30), "scroll", {"x": 1, "y": 2, "scrollX": 0, "scrollY": 30}),
    ("android", PressButton(button=Button.RECENTS), "press-button", {"buttons": ["appSwitch"]}),
    ("android", TypeText(text="naïve 好"), "type", {"text": "naïve 好", "mode": "append"}),
    ("linux", Click(x=1, y=2), "click", {"x": 1, "y": 2}),
    ("linux", RightClick(x=1, y=2), "click", {"x": 1, "y": 2, "button": "right"}),
    ("linux", MoveMouse(x=1, y=2), "move", {"x": 1, "y": 2}),
    ("linux", Drag(x=1, y=2, to_x=3, to_y=4), "drag", {"start": {"x": 1, "y": 2}, "end": {"x": 3, "y": 4}}),
    ("linux", PressKey(keys=("Ctrl", "up")), "press-key", {"keys": ["control", "arrowUp"], "combination": True}),
]
IMPOSSIBLE: list[tuple[str, Action]] = [
    ("android", RightClick(x=1, y=1)),
    ("android", MoveMouse(x=1, y=1)),
    ("android", PressKey(keys=("hyper",))),
    ("android", OpenApp(name="No such app")),
    ("android", Click(x=192, y=0)),  # the API answers 400
    ("linux", PressButton(button=Button.BACK)),
    ("linux", OpenApp(name="Files")),
    ("linux", PressKey(keys=())),
]


@pytest.mark.parametrize("box_type", ["android", "linux"])
async def test_actions_are_said_in_the_words_of_the_api(box_type: str, gbox: GboxService) -> None:
    device = await lend(gbox, box_type)

    for _, action, name, body in (entry for entry in WORDS if entry[0] == box_type):
        await device.execute(action)

        sent_name, sent = gbox.double.bodies[-1]
        assert sent_name == name
        assert {key: sent[key] for key in body} == body
        assert sent["options"]["screenshot"]["phases"] == ["after"]


@pytest.mark.parametrize("box_type", ["android", "linux"])
async def test_what_a_box_cannot_do_is_told_to_the_model(box_type: str, gbox: GboxService) -> None:
    device = await lend(gbox, box_type)

    for _, action in (entry for entry in IMPOSSIBLE if entry[0] == box_type):
        with pytest.raises(ActionRejected):
            await device.execute(action)

    assert (await device.observe()).data


async def test_scrolling_down_reveals_what_is_below(gbox: GboxService) -> None:
    device = await lend(gbox, "linux")
    (box,) = gbox.double.boxes.values()

    await device.execute(Scroll(x=160, y=170, down_px=36))

    assert box.inside.top_row == 2  # type: ignore[union-attr]


async def test_queries_and_shell_read_what_was_done_on_the_screen(gbox: GboxService) -> None:
    device = await lend(gbox)
    assert isinstance(device, ShellDevice)

    assert await device.query("is_home_screen") == "true"
    await device.execute(OpenApp(name="Settings"))

    assert await device.query("current_app") == "com.android.settings"
    await device.shell("svc wifi enable")
    assert await device.query("wifi_enabled") == "true"
    with pytest.raises(TaskError):
        await device.query("note_texts")


async def test_a_desktops_files_are_read_by_queries(gbox: GboxService) -> None:
    device = await lend(gbox, "linux")
    assert await device.query(f"file_exists:{NOTE}") == "false"
    assert await device.query(f"file_text:{NOTE}") == ""

    for action in (Click(x=20, y=50), TypeText(text="milk"), PressKey(keys=("ctrl", "s")), Wait(duration_s=0.0)):
        await device.execute(action)

    assert await device.query(f"file_text:{NOTE}") == "milk"
    with pytest.raises(TaskError, match="file_text"):
        await device.query("clipboard")


async def test_apps_are_installed_by_address_or_file_and_opened(gbox: GboxService, tmp_path: Path) -> None:
    device = await lend(gbox)
    apk = tmp_path / "com.example.notes.apk"
    apk.write_text("an app")

    await device.install_app("https://example.com/com.example.mail.apk")
    await device.install_app(str(apk))
    await device.open_app("com.android.settings")

    assert phone_of(gbox).installed == ["com.example.mail", "com.example.notes"]
    assert await device.query("current_app") == "com.android.settings"


async def test_stored_screenshots_are_downloaded_and_expired_addresses_asked_for_anew(gbox: GboxService) -> None:
    device = await lend(gbox, capture=Capture(settle_s=0.0, is_stored=True))
    gbox.double.faults.num_expired = 1

    await device.execute(Click(x=5, y=5))
    seen = await device.observe()

    assert (seen.width_px, seen.height_px) == (192, 320)
    assert gbox.double.requests["POST boxes/storage/presigned-url"] == 1


async def test_an_action_that_shows_nothing_is_followed_by_a_screenshot(gbox: GboxService) -> None:
    device = await lend(gbox)
    gbox.double.faults.num_without_screenshot = 1

    await device.execute(Click(x=5, y=5))

    assert (await device.observe()).data
    assert gbox.double.requests["POST boxes/actions/screenshot"] == 2


async def test_an_action_that_fails_is_never_repeated(gbox: GboxService) -> None:
    device = await lend(gbox)
    faults = {503: DeviceServiceError, 422: ActionRejected, 408: DeviceError, 404: DeviceLostError}

    for number, (status, fault) in enumerate(faults.items(), start=1):
        gbox.double.faults.actions.append(status)
        with pytest.raises(fault):
            await device.execute(Click(x=5, y=5))
        assert gbox.double.requests["POST boxes/actions/tap"] == number


async def test_a_refusal_for_too_many_requests_is_repeated_and_given_up_in_the_end(gbox: GboxService) -> None:
    device = await lend(gbox)
    gbox.double.faults.actions += [429, 429]
    await device.execute(Click(x=5, y=5))
    assert gbox.double.requests["POST boxes/actions/tap"] == 3

    gbox.double.faults.actions += [429] * 4
    with pytest.raises(DeviceQuotaError):
        await device.execute(Click(x=5, y=5))


async def test_screenshots_survive_a_service_that_stumbles(gbox: GboxService) -> None:
    device = await lend(gbox)
    await device.observe()
    gbox.double.faults.actions += [503, 500]

    assert (await device.observe()).data


async def test_a_film_of_the_rollout_is_kept(gbox: GboxService, tmp_path: Path) -> None:
    device = await lend(gbox, recordings=tmp_path / "recordings")
    await device.execute(Click(x=5, y=5))
    await device.execute(Click(x=6, y=6))

    await device.close()

    (film,) = (tmp_path / "recordings").iterdir()
    assert film.read_text() == "film of 2 actions"
    assert gbox.double.alive == []


async def test_closing_terminates_the_box_once_and_survives_one_that_is_gone(gbox: GboxService) -> None:
    device = await lend(gbox)
    await device.close()
    await device.close()
    assert gbox.double.alive == []
    assert gbox.double.requests["POST boxes/terminate"] == 1
    with pytest.raises(DeviceError, match="closed"):
        await device.observe()

    lost = await lend(gbox)
    gbox.double.boxes[lost.device_id].status = "terminated"
    await lost.close()
