import json

import pytest

from cua_rl.agent.element_tools import parse_element_action
from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE, parse_action, tool_for
from cua_rl.types.actions import (
    Button,
    Click,
    DoubleClick,
    Drag,
    Finish,
    LongPress,
    MoveMouse,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.conversation import ParseFailure, ToolCall


def parse(name: str, arguments: object, cursor: tuple[int, int] | None = None):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return parse_action(ToolCall(call_id="c", name=name, arguments=text), width_px=200, height_px=400, cursor=cursor)


@pytest.mark.parametrize(
    ("coordinate", "pixel"),
    [([0, 0], (0, 0)), ([500, 500], (100, 200)), ([999, 999], (199, 399)), ([1000, 1000], (199, 399))],
)
def test_relative_coordinates_become_pixels_and_stay_on_the_screen(
    coordinate: list[int], pixel: tuple[int, int]
) -> None:
    # 500 / 1000 * 200 px = 100 px; 1000 would be pixel 200 of 0..199, so it is clamped
    assert parse("mobile_use", {"action": "click", "coordinate": coordinate}) == Click(x=pixel[0], y=pixel[1])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"action": "long_press", "coordinate": [10, 10], "time": 2}, LongPress(x=2, y=4, duration_s=2.0)),
        (
            {"action": "swipe", "coordinate": [500, 800], "coordinate2": [500, 200]},
            Drag(x=100, y=320, to_x=100, to_y=80),
        ),
        ({"action": "type", "text": "hé"}, TypeText(text="hé")),
        ({"action": "system_button", "button": "Back"}, PressButton(button=Button.BACK)),
        ({"action": "system_button", "button": "Menu"}, PressButton(button=Button.RECENTS)),
        ({"action": "system_button", "button": "Enter"}, PressKey(keys=("enter",))),
        ({"action": "wait", "time": 0.5}, Wait(duration_s=0.5)),
        ({"action": "answer", "text": "42"}, Finish(success_claimed=True, answer="42")),
        ({"action": "terminate", "status": "failure"}, Finish(success_claimed=False)),
    ],
)
def test_every_phone_action_is_understood(arguments: dict[str, object], expected: object) -> None:
    assert parse("mobile_use", arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"action": "left_click", "coordinate": [500, 500]}, Click(x=100, y=200)),
        ({"action": "right_click", "coordinate": [500, 500]}, RightClick(x=100, y=200)),
        ({"action": "double_click", "coordinate": [500, 500]}, DoubleClick(x=100, y=200)),
        ({"action": "mouse_move", "coordinate": [500, 500]}, MoveMouse(x=100, y=200)),
        ({"action": "left_click_drag", "coordinate": [500, 500]}, Drag(x=7, y=8, to_x=100, to_y=200)),
        ({"action": "scroll", "pixels": -30}, Scroll(x=7, y=8, down_px=30)),
        ({"action": "scroll", "pixels": 30, "coordinate": [0, 0]}, Scroll(x=0, y=0, down_px=-30)),
        ({"action": "key", "keys": ["ctrl", "s"]}, PressKey(keys=("ctrl", "s"))),
        ({"action": "type", "text": "x"}, TypeText(text="x")),
        ({"action": "wait"}, Wait(duration_s=1.0)),
        ({"action": "terminate", "status": "success"}, Finish(success_claimed=True)),
    ],
)
def test_every_desktop_action_is_understood(arguments: dict[str, object], expected: object) -> None:
    assert parse("computer_use", arguments, cursor=(7, 8)) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "says"),
    [
        ("phone_use", {"action": "click"}, "tool_name", "mobile_use"),
        ("mobile_use", "{", "tool_arguments", "no JSON"),
        ("mobile_use", "[1]", "tool_arguments", "Expected an object"),
        ("mobile_use", {"action": "tap"}, "tool_arguments", "Expected one of click"),
        ("mobile_use", {"action": "type", "text": "\ud800"}, "tool_arguments", "valid Unicode"),
        ("mobile_use", {"action": ["click"]}, "tool_arguments", "Expected one of click"),
        ("mobile_use", {"action": "click"}, "tool_arguments", "coordinate is None"),
        ("mobile_use", {"action": "click", "coordinate": [1, 2, 3]}, "tool_arguments", "[1, 2, 3]"),
        ("mobile_use", {"action": "click", "coordinate": [1001, 0]}, "tool_arguments", "0 to 1000"),
        ("mobile_use", {"action": "click", "coordinate": [True, 0]}, "tool_arguments", "0 to 1000"),
        ("mobile_use", '{"action": "click", "coordinate": [NaN, 0]}', "tool_arguments", "0 to 1000"),
        ("mobile_use", {"action": "swipe", "coordinate": [1, 2]}, "tool_arguments", "coordinate2 is None"),
        ("mobile_use", {"action": "type"}, "tool_arguments", "a string"),
        ("mobile_use", {"action": "wait", "time": 1e9}, "tool_arguments", "0 to 60"),
        ("mobile_use", {"action": "system_button", "button": "Power"}, "tool_arguments", "Back, Home, Menu or Enter"),
        ("mobile_use", {"action": "terminate"}, "tool_arguments", "success or failure"),
        ("computer_use", {"action": "left_click_drag", "coordinate": [1, 2]}, "tool_arguments", "mouse_move first"),
        ("computer_use", {"action": "key", "keys": "enter"}, "tool_arguments", "a list of names"),
        # an argument that is passed over would make it another action
        (
            "computer_use",
            {"action": "left_click", "coordinate": [1, 2], "button": "right"},
            "tool_arguments",
            "'button'",
        ),
        ("mobile_use", {"action": "wait", "seconds": 9}, "tool_arguments", "There is no argument 'seconds'"),
    ],
)
def test_bad_calls_say_what_came_and_what_was_expected(name: str, arguments: object, kind: str, says: str) -> None:
    failure = parse(name, arguments)
    assert isinstance(failure, ParseFailure)
    assert failure.kind == kind
    assert says in failure.message


def test_a_described_element_takes_no_unknown_arguments() -> None:
    for name, arguments in (
        ("computer_act", {"action": "left_click", "target": "Save", "button": "right"}),
        ("mobile_act", {"action": "scroll", "target": "list", "direction": "down", "amount": 3}),
        ("mobile_act", {"action": "type", "text": "tea", "target": "Search"}),  # typed where the focus is
    ):
        failure = parse_element_action(ToolCall(call_id="c", name=name, arguments=json.dumps(arguments)))
        assert isinstance(failure, ParseFailure)
        assert "there is no" in failure.message.lower()


def test_phones_get_mobile_use_and_desktops_and_browsers_computer_use() -> None:
    assert [tool_for("android"), tool_for("linux"), tool_for("browser")] == [MOBILE_USE, COMPUTER_USE, COMPUTER_USE]


@pytest.mark.parametrize(
    "arguments",
    [
        f'{{"action": "wait", "time": {"1" * 400}}}',
        f'{{"action": "scroll", "pixels": {"1" * 400}}}',
        '{"action": "scroll", "pixels": 1e300}',
        '{"action": "scroll", "pixels": NaN}',
        f'{{"action": "type", "text": "{" " * 2001}"}}',
        f'{{"action": {"[" * 5000}{"]" * 5000}}}',
        f'{{"action": "left_click", "coordinate": {"[" * 5000}{"]" * 5000}}}',
    ],
)
def test_a_model_cannot_break_the_parser_or_scroll_or_type_for_ever(arguments: str) -> None:
    call = ToolCall(call_id="c", name="computer_act", arguments=arguments)
    for parsed in (parse("computer_use", arguments), parse_element_action(call)):
        assert isinstance(parsed, ParseFailure)
        assert parsed.kind == "tool_arguments"
        assert len(parsed.message) < 20_000
