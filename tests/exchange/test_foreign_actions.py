"""Actions of other systems as calls of our tools."""

from typing import Any

import pytest

from cua_rl.exchange.code_actions import parse_code
from cua_rl.exchange.foreign_actions import ForeignAction, UnknownAction, View, tool_arguments
from cua_rl.types.conversation import EncodedImage

SCREEN = EncodedImage(data=b"", format="png", width_px=1000, height_px=500)


WAIT, HOME = {"action": "wait", "time": 1.0}, {"action": "system_button", "button": "Home"}


def at(action: str, *points: list[int], **more: Any) -> dict[str, Any]:
    """A call with one or two coordinates."""
    return {"action": action, **dict(zip(("coordinate", "coordinate2"), points, strict=False)), **more}


@pytest.mark.parametrize(
    ("kind", "name", "given", "expected"),
    [
        ("android", "click", {"x": 250, "y": 250}, [at("click", [250, 500])]),
        ("android", "long_press", {"x": 0, "y": 499}, [at("long_press", [0, 998])]),
        ("android", "navigate_home", {}, [HOME]),
        ("android", "keyboard_enter", {}, [{"action": "system_button", "button": "Enter"}]),
        # what is revealed lies below, so the finger moves up: 60 % of the screen around its middle
        ("android", "scroll", {"direction": "down"}, [at("swipe", [500, 800], [500, 200])]),
        ("android", "swipe", {"direction": "up"}, [at("swipe", [500, 800], [500, 200])]),
        (
            "android",
            "swipe",
            {"start_x": 100, "start_y": 400, "end_x": 100, "end_y": 100},
            [at("swipe", [100, 800], [100, 200])],
        ),
        ("android", "input_text", {"text": "a", "x": 10, "y": 10}, [at("click", [10, 20]), at("type", text="a")]),
        ("android", "wait", {}, [WAIT]),
        ("android", "status", {"goal_status": "infeasible"}, [at("terminate", status="failure")]),
        ("android", "status", {"goal_status": "complete"}, [at("terminate", status="success")]),
        ("android", "answer", {"text": "12"}, [at("answer", text="12")]),
        ("android", "mobile_use", at("click", [1, 2]), [at("click", [1, 2])]),
        ("browser", "mouse_click", {"x": 0.25, "y": 0.5}, [at("left_click", [250, 500])]),
        ("browser", "click", {"x": 500, "y": 250, "button": "left"}, [at("left_click", [500, 500])]),
        ("browser", "click", {"x": 500, "y": 250, "button": "right"}, [at("right_click", [500, 500])]),
        ("linux", "click", {"x": 500, "y": 250, "clicks": 2, "button": None}, [at("double_click", [500, 500])]),
        ("browser", "computer", at("double_click", [500, 250]), [at("double_click", [500, 500])]),
        ("browser", "scroll", {"delta_x": 0, "delta_y": 200}, [at("scroll", [500, 500], pixels=-200.0)]),
        ("browser", "scroll", {"clicks": -5}, [at("scroll", [500, 500], pixels=-500.0)]),
        ("browser", "scroll", {"page": -0.5}, [at("scroll", [500, 500], pixels=-250.0)]),
        ("browser", "keyboard_press", {"key": "Control+a"}, [at("key", keys=["ctrl", "a"])]),
        ("browser", "go_back", {}, [at("key", keys=["alt", "left"])]),
        (
            "browser",
            "mouse_drag_and_drop",
            {"from_x": 0, "from_y": 0, "to_x": 500, "to_y": 250},
            [at("mouse_move", [0, 0]), at("left_click_drag", [500, 500])],
        ),
        ("linux", "dragTo", {"x": 500, "y": 250}, [at("left_click_drag", [500, 500])]),
        ("linux", "send_msg_to_user", {"text": "yes"}, [at("answer", text="yes")]),
    ],
)
def test_an_action_becomes_calls_of_our_tool(kind: Any, name: str, given: dict[str, Any], expected: list[Any]) -> None:
    view = View(screen=SCREEN, kind=kind)
    assert tool_arguments(ForeignAction(name=name, given=given), view) == expected


@pytest.mark.parametrize(
    ("kind", "name", "given", "complaint"),
    [
        ("browser", "click", {"bid": "a51"}, "expected coordinates on the screenshot"),
        ("browser", "click", {"x": 1200, "y": 10}, "expected coordinates on the screenshot of 1000 x 500 pixels"),
        ("browser", "click", {"x": 1, "y": 1, "button": "middle"}, "expected an action of computer_use"),
        ("browser", "click", {"x": 1, "y": 1, "clicks": 3}, "expected an action of computer_use"),
        ("browser", "double_click", {"x": 1, "y": 1, "button": "right"}, "expected an action of computer_use"),
        ("android", "click", {"x": 1, "y": 1, "button": "right"}, "expected an action of mobile_use"),
        ("browser", "goto", {"url": "http://a/"}, "expected an action with a counterpart in our tools"),
        ("browser", "mobile_use", at("click", [1, 2]), "expected calls of computer_use, got mobile_use; set device"),
        ("android", "right_click", {"x": 1, "y": 1}, "expected an action of mobile_use"),
        ("android", "press", {"key": "F5"}, "expected Back, Home, Enter or the recent apps"),
        ("android", "scroll", {"direction": "inwards"}, "expected up, down, left or right"),
        ("browser", "scroll", {"direction": "right"}, "expected a vertical scroll"),
        ("browser", "type", {}, "expected a text"),
        ("browser", "wait", {"time": "long"}, "expected a number"),
        ("android", "drag", {"x": 1, "y": 1}, "expected where the swipe starts"),
    ],
)
def test_what_our_tools_cannot_do_is_refused(kind: Any, name: str, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnknownAction, match=complaint):
        tool_arguments(ForeignAction(name=name, given=given), View(screen=SCREEN, kind=kind))


def test_code_is_read_call_by_call_and_never_run() -> None:
    code = "import pyautogui\npyautogui.click(100, 200)\npyautogui.hotkey('ctrl', 'c')\nwrite('a', interval=0.1)"
    assert list(parse_code(code)) == [
        ForeignAction(name="click", given={"x": 100, "y": 200}),
        ForeignAction(name="hotkey", given={"keys": ["ctrl", "c"]}),
        ForeignAction(name="write", given={"interval": 0.1, "text": "a"}),
    ]
    for broken in (
        "mouse_drag_and_drop(1, 2, 30, 40)",
        "press('left', presses=1000)",
        "x = 1",
        "click(",
        "click(x=where)",
        "click(x=open('/etc/passwd'))",
        "click({[]: 1})",
        "write('\ud83d')",
        "a\0",
    ):
        with pytest.raises(UnknownAction, match="expected"):
            list(parse_code(broken))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pyautogui.click(500, 250, 2)", [at("double_click", [500, 500])]),
        ("pyautogui.click(500, 250, 1, 0.0, 'right')", [at("right_click", [500, 500])]),
        ("pyautogui.moveTo(500, 250, 0.5)", [at("mouse_move", [500, 500])]),
        ("pyautogui.scroll(-5, 500, 250)", [at("scroll", [500, 500], pixels=-500.0)]),
        ("pyautogui.press('tab', presses=2)", [at("key", keys=["tab"])] * 2),
        ("pyautogui.press(['up', 'enter'])", [at("key", keys=["up"]), at("key", keys=["enter"])]),
        ("pyautogui.hotkey(['ctrl', 'c'])", [at("key", keys=["ctrl", "c"])]),
    ],
)
def test_code_means_what_pyautogui_would_do(code: str, expected: list[Any]) -> None:
    assert [
        call for action in parse_code(code) for call in tool_arguments(action, View(screen=SCREEN, kind="linux"))
    ] == expected
