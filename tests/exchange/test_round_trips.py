"""Our own actions, written in the formats of others and imported again, have the same pixels."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cua_rl.agent.tools import parse_action, tool_for
from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.foreign_actions import ForeignAction, View, tool_arguments
from cua_rl.types.actions import (
    Action,
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
from cua_rl.types.conversation import EncodedImage, ParseFailure, ToolCall

SCREENS = {"android": (1080, 2400), "browser": (1280, 800), "linux": (1920, 1080)}
Size = tuple[int, int]
Writer = Mapping[type, Callable[[Any, Size], dict[str, Any]]]
"""How a format writes an action of ours, on a display of this size; scrolls are whole clicks of 100 px."""


def act(name: str, **given: Any) -> dict[str, Any]:
    return {"action": name, **given}


def way(scroll: Scroll) -> str:
    return "down" if scroll.down_px > 0 else "up"


def thousandths(x: int, y: int, size: Size) -> dict[str, int]:
    return {"x": round(x / size[0] * 1000), "y": round(y / size[1] * 1000)}


ANTHROPIC: Writer = {
    Click: lambda one, _: act("left_click", coordinate=[one.x, one.y]),
    DoubleClick: lambda one, _: act("double_click", coordinate=[one.x, one.y]),
    RightClick: lambda one, _: act("right_click", coordinate=[one.x, one.y]),
    MoveMouse: lambda one, _: act("mouse_move", coordinate=[one.x, one.y]),
    Drag: lambda one, _: act("left_click_drag", start_coordinate=[one.x, one.y], coordinate=[one.to_x, one.to_y]),
    Scroll: lambda one, _: act(
        "scroll", coordinate=[one.x, one.y], scroll_direction=way(one), scroll_amount=abs(one.down_px) // 100
    ),
    TypeText: lambda one, _: act("type", text=one.text),
    PressKey: lambda one, _: act("key", text="+".join(one.keys).replace("enter", "Return").replace("pagedown", "Next")),
    Wait: lambda one, _: act("wait", duration=one.duration_s),
}
OPENAI: Writer = {
    Click: lambda one, _: {"type": "click", "button": "left", "x": one.x, "y": one.y, "keys": None},
    DoubleClick: lambda one, _: {"type": "double_click", "x": one.x, "y": one.y, "keys": None},
    RightClick: lambda one, _: {"type": "click", "button": "right", "x": one.x, "y": one.y},
    MoveMouse: lambda one, _: {"type": "move", "x": one.x, "y": one.y},
    Drag: lambda one, _: {"type": "drag", "path": [{"x": one.x, "y": one.y}, {"x": one.to_x, "y": one.to_y}]},
    Scroll: lambda one, _: {"type": "scroll", "x": one.x, "y": one.y, "scroll_x": 0, "scroll_y": one.down_px},
    TypeText: lambda one, _: {"type": "type", "text": one.text},
    PressKey: lambda one, _: {"type": "keypress", "keys": [key.upper() if key != "a" else key for key in one.keys]},
}
GEMINI: Writer = {
    Click: lambda one, size: act("click_at", **thousandths(one.x, one.y, size)),
    MoveMouse: lambda one, size: act("hover_at", **thousandths(one.x, one.y, size)),
    Drag: lambda one, size: act(
        "drag_and_drop",
        **thousandths(one.x, one.y, size),
        **{f"destination_{name}": value for name, value in thousandths(one.to_x, one.to_y, size).items()},
    ),
    Scroll: lambda one, size: act(
        "scroll_at", direction=way(one), magnitude=abs(one.down_px) / size[1] * 1000, **thousandths(one.x, one.y, size)
    ),
    PressKey: lambda one, _: act("key_combination", keys="+".join(one.keys)),
    TypeText: lambda one, _: act("type", text=one.text, press_enter=False),
}
ANDROID_CONTROL: Writer = {
    Click: lambda one, _: {"action_type": "click", "x": one.x, "y": one.y},
    LongPress: lambda one, _: {"action_type": "long_press", "x": one.x, "y": one.y, "time": one.duration_s},
    Drag: lambda one, _: act("swipe", start_x=one.x, start_y=one.y, end_x=one.to_x, end_y=one.to_y),
    TypeText: lambda one, _: {"action_type": "input_text", "text": one.text},
    PressButton: lambda _, __: {"action_type": "navigate_back"},
}
CODE: Writer = {  # shares, as AGUVIS writes them
    Click: lambda one, size: act("click", x=one.x / size[0], y=one.y / size[1]),
    RightClick: lambda one, size: act("rightClick", x=one.x / size[0], y=one.y / size[1]),
    Scroll: lambda one, size: act("scroll", page=-one.down_px / size[1], x=one.x / size[0], y=one.y / size[1]),
}


def of_ours(rng: random.Random, kind: DeviceKind) -> Action:
    """An action that our agent can do on this device."""
    width, height = SCREENS[kind]
    x, to_x = rng.sample(range(width), 2)
    y, to_y = rng.sample(range(height), 2)
    pointed = [Click(x=x, y=y), Drag(x=x, y=y, to_x=to_x, to_y=to_y), TypeText(text=rng.choice(["tea", "a b", " é"]))]
    if kind == "android":
        return rng.choice([*pointed, LongPress(x=x, y=y, duration_s=2.0), PressButton(button=Button.BACK)])
    scrolled = Scroll(x=x, y=y, down_px=100 * rng.choice([-7, -1, 1, 3]))
    keys = PressKey(keys=rng.choice([("ctrl", "s"), ("enter",), ("pagedown",), ("a",), ("ctrl", "+")]))
    at = [DoubleClick(x=x, y=y), RightClick(x=x, y=y), MoveMouse(x=x, y=y)]
    return rng.choice([*pointed, *at, scrolled, keys, Wait(duration_s=3.0)])


def through(given: dict[str, Any], kind: DeviceKind, display: Size | None) -> Action:
    """The last action that our agent does for an imported one."""
    width, height = SCREENS[kind]
    screen = EncodedImage(data=b"", format="png", width_px=width, height_px=height)
    cursor: tuple[int, int] | None = None
    made: Action | None = None
    view = View(screen=screen, kind=kind, display=display)
    for arguments in tool_arguments(ForeignAction(name="computer", given=given), view):
        call = ToolCall(call_id="c", name=tool_for(kind).name, arguments=json.dumps(arguments))
        parsed = parse_action(call, width_px=width, height_px=height, cursor=cursor)
        assert not isinstance(parsed, Finish | ParseFailure), parsed
        made, cursor = parsed, (parsed.x, parsed.y) if isinstance(parsed, MoveMouse) else cursor
    assert made is not None
    return made


def on_display(action: Action, scale: int) -> Action:
    """The same action in pixels of a display that is larger than the screenshot."""
    numbers = {name: getattr(action, name) * scale for name in action.__slots__ if name[-1:] in "xy" or "_px" in name}
    others = {name: getattr(action, name) for name in action.__slots__ if name not in numbers}
    return type(action)(**numbers, **others)


@pytest.mark.parametrize(
    ("kind", "writer", "scale"),
    [
        *[(kind, writer, 1) for kind in ("browser", "linux") for writer in (ANTHROPIC, OPENAI, GEMINI, CODE)],
        *[("android", writer, 1) for writer in (ANTHROPIC, ANDROID_CONTROL, CODE)],
        *[("browser", OPENAI, 2), ("linux", OPENAI, 3), ("android", ANDROID_CONTROL, 2)],
    ],
)
def test_our_actions_come_back_from_every_format_within_a_pixel(kind: DeviceKind, writer: Writer, scale: int) -> None:
    rng = random.Random(7)
    width, height = SCREENS[kind]
    actions = [action for action in (of_ours(rng, kind) for _ in range(300)) if type(action) in writer]
    assert len(actions) >= 40
    for action in actions:
        given = writer[type(action)](on_display(action, scale), (width, height))
        made = through(given, kind, None if scale == 1 else (width * scale, height * scale))
        assert type(made) is type(action), (action, given, made)
        for name in action.__slots__:
            ours, came = getattr(action, name), getattr(made, name)
            assert abs(ours - came) <= 1 if isinstance(ours, int) else ours == came, (name, action, given, made)
