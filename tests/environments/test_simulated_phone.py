"""The embedded phone: determinism, gestures, what is drawn is what is tapped, queries, faults."""

import io
import json
from dataclasses import asdict, replace
from hashlib import sha256

import pytest
from PIL import Image

from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.apps.calculator import evaluate
from cua_rl.environments.phone.simulator.catalog import APPS, NUM_ROWS_VISIBLE, SETTINGS, Toggle
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.elements import Element
from cua_rl.environments.phone.simulator.painter import draw_phone, draw_png
from cua_rl.environments.phone.simulator.queries import QUERIES, read_query
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import Start, make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.types.actions import (
    Button,
    Click,
    Drag,
    LongPress,
    MoveMouse,
    OpenApp,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
)
from cua_rl.types.errors import DeviceError, TaskError


def element(state: PhoneState, label: str) -> Element:
    screen = build_screen(state)
    return next(item for item in (*screen.fixed, *screen.content) if item.label == label and item.is_tappable)


def tap_on(state: PhoneState, label: str) -> PhoneState:
    return reducer.tap(state, *element(state, label).rect.centre)


def every_screen(seed: int = 3) -> list[PhoneState]:
    home = make_phone_state(seed, Start(first_page=("settings", "notes", "messages", "mail")))
    settings = tap_on(home, "Settings")
    pages = [tap_on(replace(settings, setting_rows=(page, *settings.setting_rows)), SETTINGS[page].label)
             for page in ("display", "sound", "date", "about")]  # fmt: skip
    thread = tap_on(tap_on(home, "Messages"), home.threads[0].contact)
    return [
        home,
        *(reducer.launch(home, app) for app in APPS),
        *pages,
        tap_on(tap_on(home, "Notes"), "New"),
        thread,
        tap_on(thread, "Message"),
        reducer.press(home, Button.RECENTS),
        reducer.press(settings, Button.RECENTS),
        reducer.press(home, Button.POWER),
        reducer.press(home, Button.VOLUME_UP),
    ]


def test_the_same_seed_and_actions_give_the_same_png() -> None:
    first, again = (sha256(draw_png(reducer.launch(make_phone_state(7), "settings"), 1)).hexdigest() for _ in range(2))

    assert first == again


def test_different_seeds_give_different_home_screens() -> None:
    pictures = {draw_png(make_phone_state(seed), 1) for seed in range(30)}

    assert len(pictures) == 30


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_screens_are_192_by_320_units_at_every_scale(scale: int) -> None:
    picture = Image.open(io.BytesIO(draw_png(make_phone_state(0), scale)))

    assert picture.size == (192 * scale, 320 * scale)


def test_every_screen_draws_in_light_and_dark_and_the_two_differ() -> None:
    for state in every_screen():
        light = draw_phone(state.with_toggle(Toggle.DARK_THEME, False), 1)
        dark = draw_phone(state.with_toggle(Toggle.DARK_THEME, True), 1)

        assert (light.tobytes() != dark.tobytes()) == state.is_screen_on, state.screen


def test_every_tappable_element_is_hit_at_its_centre_and_has_a_unique_id() -> None:
    for state in every_screen():
        screen = build_screen(state)
        shown = [item for item in (*screen.fixed, *screen.visible_content()) if item.is_tappable]

        assert len({item.element_id for item in shown}) == len(shown), state.screen
        for item in shown:
            assert screen.element_at(*item.rect.centre) == item, (state.screen, item.label)


def test_state_is_plain_json_and_hashable() -> None:
    state = make_phone_state(4)

    assert json.loads(json.dumps(asdict(state)))["seed"] == 4
    assert hash(state) == hash(make_phone_state(4))


def test_a_start_is_obeyed_for_every_seed() -> None:
    start = Start(
        first_page=("settings", "mail"), second_page=("maps",), first_rows=("wifi",), hidden_rows=("location",),
        on=(Toggle.BLUETOOTH,), off=(Toggle.DARK_THEME,), contact="Emma",
    )  # fmt: skip

    for seed in range(200):
        state = make_phone_state(seed, start)
        first, second = ([place.app for place in page] for page in state.home_pages)
        assert {"settings", "mail"} <= set(first)
        assert "maps" in second
        assert sorted(first + second) == sorted(APPS)
        assert len(first) == len(second) == 8
        assert "wifi" in state.setting_rows[:NUM_ROWS_VISIBLE]
        assert "location" in state.setting_rows[NUM_ROWS_VISIBLE:]
        assert sorted(state.setting_rows) == sorted(SETTINGS)
        assert state.is_on(Toggle.BLUETOOTH)
        assert not state.is_on(Toggle.DARK_THEME)
        assert "Emma" in [thread.contact for thread in state.threads]


def test_icons_never_overlap_nor_leave_the_screen() -> None:
    for seed in range(200):
        for page in range(2):
            icons = build_screen(replace(make_phone_state(seed), home_page=page)).content
            for i, icon in enumerate(icons):
                assert icon.rect.x >= 0
                assert icon.rect.right <= 192
                assert icon.rect.bottom <= 300
                for other in icons[:i]:
                    assert not other.rect.contains(*icon.rect.centre)


def test_a_swipe_left_shows_the_second_page_and_home_returns_to_the_first() -> None:
    state = reducer.drag(make_phone_state(1), 150, 170, 40, 170)
    assert state.home_page == 1

    assert reducer.press(state, Button.HOME).home_page == 0


def test_seven_settings_rows_show_and_a_drag_reveals_the_rest() -> None:
    state = reducer.launch(make_phone_state(1), "settings")
    assert len(build_screen(state).visible_content()) == NUM_ROWS_VISIBLE

    state = reducer.drag(state, 96, 260, 96, 60)

    last = SETTINGS[state.setting_rows[-1]].label
    assert last in [item.label for item in build_screen(state).visible_content()]


def test_airplane_mode_takes_wifi_and_bluetooth_down() -> None:
    start = Start(first_rows=("airplane_mode",), on=(Toggle.WIFI, Toggle.BLUETOOTH), off=(Toggle.AIRPLANE_MODE,))
    state = tap_on(reducer.launch(make_phone_state(2, start), "settings"), "Airplane")

    assert [read_query(state, name) for name in ("airplane_mode", "wifi_enabled", "bluetooth_enabled")] == [
        "true",
        "false",
        "false",
    ]


def test_back_closes_the_keyboard_then_the_page_then_the_app() -> None:
    state = tap_on(reducer.launch(make_phone_state(1), "notes"), "New")
    screens: list[str] = []
    for _ in range(3):
        state = reducer.press(state, Button.BACK)
        screens.append(state.screen)

    assert screens == ["notes/new", "notes", "home"]


def test_a_note_can_be_typed_on_the_drawn_keyboard() -> None:
    state = tap_on(reducer.launch(make_phone_state(1), "notes"), "New")
    for key in ("h", "i", "x", "Del", "space", "a"):
        state = tap_on(state, key)
    state = tap_on(state, "Save")

    assert json.loads(read_query(state, "note_texts"))[-1] == "hi a"
    assert state.screen == "notes"


def test_a_slider_moves_to_where_it_is_dragged() -> None:
    state = make_phone_state(1, Start(first_rows=("display",), brightness_level=128))
    state = tap_on(reducer.launch(state, "settings"), "Display")
    x, y = element(state, "Brightness").rect.centre

    assert reducer.drag(state, x, y, 191, y).brightness_level == 255
    assert reducer.drag(state, x, y, 0, y).brightness_level == 1
    # The track runs from 48 to 176: its middle, 112, is half of 255.
    assert reducer.tap(state, 112, y).brightness_level == 128


def test_the_apps_do_what_they_show() -> None:
    home = make_phone_state(1)
    calculator = reducer.launch(home, "calculator")
    for key in "12*3=":
        calculator = tap_on(calculator, key)
    phone = reducer.launch(home, "phone")
    for key in ("5", "0", "Call"):
        phone = tap_on(phone, key)

    assert calculator.calculation == "36"
    assert phone.calls == ("50",)
    assert tap_on(reducer.launch(home, "camera"), "Shutter").num_photos == home.num_photos + 1
    music = reducer.launch(home, "music")
    first_track = build_screen(music).content[0].label
    assert build_screen(tap_on(music, first_track)).content[0].detail == "Playing"


@pytest.mark.parametrize(
    ("text", "value"),
    [("2+3*4", "14"), ("-5+3", "-2"), ("7/2", "3.5"), ("1/0", "Error"), ("2+", "Error"), ("", "Error")],
)
def test_calculator_arithmetic(text: str, value: str) -> None:
    assert evaluate(text) == value


def test_a_dark_screen_reacts_to_the_power_button_only() -> None:
    home = make_phone_state(1)
    off = reducer.press(home, Button.POWER)

    assert reducer.tap(off, 96, 310) == off
    assert reducer.press(off, Button.HOME) == off
    assert reducer.press(off, Button.POWER) == home


def test_every_query_answers_on_every_screen() -> None:
    for state in every_screen():
        for name in QUERIES:
            assert isinstance(read_query(state, name), str)


def test_an_unknown_query_names_near_matches() -> None:
    with pytest.raises(TaskError, match="'wifi_enabled'"):
        read_query(make_phone_state(0), "wifi_enable")


async def test_actions_are_given_in_pixels_of_the_scaled_screen() -> None:
    phone = SimulatedPhone(make_phone_state(5), scale=3)
    x, y = element(phone.state, "Settings").rect.centre

    await phone.execute(Click(x=3 * x + 1, y=3 * y - 1))

    assert await phone.query("current_app") == "com.android.settings"
    assert (await phone.observe()).width_px == 576


@pytest.mark.parametrize(
    "action",
    [
        RightClick(x=5, y=5),
        MoveMouse(x=5, y=5),
        PressKey(keys=("ctrl", "s")),
        TypeText(text="hello"),
        OpenApp(name="Solitaire"),
        Click(x=192, y=0),
        Drag(x=0, y=0, to_x=0, to_y=-1),
    ],
)
async def test_what_a_phone_cannot_do_is_rejected(
    action: RightClick | MoveMouse | PressKey | TypeText | OpenApp | Click | Drag,
) -> None:
    phone = SimulatedPhone(make_phone_state(5))
    before = phone.state

    with pytest.raises(ActionRejected):
        await phone.execute(action)

    assert phone.state == before


async def test_apps_open_by_name_buttons_leave_them_and_wheels_scroll() -> None:
    phone = SimulatedPhone(make_phone_state(5))
    await phone.execute(OpenApp(name="contacts"))
    await phone.execute(Scroll(x=96, y=150, down_px=100))
    scrolled = phone.state.scroll
    await phone.execute(PressButton(button=Button.RECENTS))

    assert scrolled > 0
    assert await phone.query("current_screen") == "recents"
    assert json.loads(await phone.query("recent_apps")) == ["com.android.contacts"]


async def test_a_long_press_on_an_icon_does_not_open_it() -> None:
    phone = SimulatedPhone(make_phone_state(5))
    x, y = element(phone.state, "Settings").rect.centre

    await phone.execute(LongPress(x=x, y=y))

    assert await phone.query("is_home_screen") == "true"


async def test_a_closed_phone_and_an_injected_fault_are_device_errors() -> None:
    def fail(operation: str) -> None:
        if operation == "execute":
            raise DeviceError("lost")

    phone = SimulatedPhone(make_phone_state(5), on_operation=fail)
    await phone.observe()
    with pytest.raises(DeviceError, match="lost"):
        await phone.execute(PressButton(button=Button.HOME))

    await phone.close()
    await phone.close()
    with pytest.raises(DeviceError, match="closed"):
        await phone.observe()
