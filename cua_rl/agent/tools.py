"""The tools that the model may call, in the format that Qwen3-VL was trained on, the prompts that introduce them, and
the parsing of calls into actions.

`mobile_use` operates phones, `computer_use` desktops and browsers. Coordinates are relative: 0 to 1000 on both axes,
whatever the size of the screenshot. Other formats (`action_format.py`) have further actions and other scales.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import inf

from cua_rl.environments.device import DeviceKind
from cua_rl.types import actions
from cua_rl.types.conversation import ParseFailure, Tool, ToolCall
from cua_rl.types.json_values import Json, is_object, mapping, sequence

MAX_COORDINATE = 1000
RELATIVE = f"Coordinates are [x, y], each from 0 to {MAX_COORDINATE}, origin top left."
MAX_WAIT_S = 60.0
MAX_TYPED_CHARACTERS = 2000  # browsers and phones take several ms for each; a text that takes too long is a fault
MAX_SCROLL_PX = 100_000
"""A device turns its wheel notch by notch."""
_EXPECTED_OBJECT = 'Expected an object such as {"action": "wait", "time": 1}.'

_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_SYSTEM_BUTTONS: Mapping[str, actions.Action] = {
    "back": actions.PressButton(button=actions.Button.BACK),
    "home": actions.PressButton(button=actions.Button.HOME),
    "menu": actions.PressButton(button=actions.Button.RECENTS),
    "enter": actions.PressKey(keys=("enter",)),
}

MOBILE_USE = Tool(
    name="mobile_use",
    description=f"Do one action on the touchscreen. {RELATIVE}",
    parameters={
        "type": "object",
        "properties": {
            "action": {
                "type": "string",
                "enum": ["click", "long_press", "swipe", "type", "answer", "system_button", "wait", "terminate"],
            },
            "coordinate": _POINT | {"description": "where to click, long_press, or start a swipe"},
            "coordinate2": _POINT | {"description": "where a swipe ends"},
            "text": {"type": "string", "description": "what to type or answer"},
            "time": {"type": "number", "description": "seconds to long_press or wait"},
            "button": {"type": "string", "enum": ["Back", "Home", "Menu", "Enter"]},
            "status": {"type": "string", "enum": ["success", "failure"], "description": "how the task ended"},
        },
        "required": ["action"],
    },
)

COMPUTER_USE = Tool(
    name="computer_use",
    description=f"Do one action with mouse or keyboard. {RELATIVE}",
    parameters={
        "type": "object",
        "properties": {
            "action": {
                "type": "string",
                "enum": [
                    "key",
                    "type",
                    "mouse_move",
                    "left_click",
                    "left_click_drag",
                    "right_click",
                    "double_click",
                    "scroll",
                    "wait",
                    "terminate",
                    "answer",
                ],
            },
            "keys": {"type": "array", "items": {"type": "string"}, "description": "keys to press together"},
            "text": {"type": "string", "description": "what to type or answer"},
            "coordinate": _POINT | {"description": "where; left_click_drag drags from the cursor to here"},
            "pixels": {"type": "number", "description": "how far to scroll, positive is up"},
            "time": {"type": "number", "description": "seconds to wait"},
            "status": {"type": "string", "enum": ["success", "failure"], "description": "how the task ended"},
        },
        "required": ["action"],
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """The arguments of one call, with the size of the screenshot and the cursor that they refer to."""

    values: Mapping[str, object]
    width_px: int
    height_px: int
    cursor: tuple[int, int] | None
    scale: tuple[int, int]


class _BadArguments(Exception):
    """Arguments that do not describe an action; the message is for the model."""


def load_system_prompt(kind: DeviceKind, *, of_elements: bool = False) -> str:
    """The system prompt for a kind of device; `of_elements` for the tools that take descriptions, not coordinates."""
    name = f"{kind}_elements.txt" if of_elements else f"{kind}.txt"
    return files("cua_rl.agent").joinpath("prompts", name).read_text(encoding="utf-8").strip()


def function_tool(tool: Tool) -> Json:
    """The tool as a function in the `tools` of a Responses request."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": False,
    }


def tool_for(kind: DeviceKind) -> Tool:
    """The tool that operates this kind of device."""
    return MOBILE_USE if kind == "android" else COMPUTER_USE


def parse_action(
    call: ToolCall,
    *,
    width_px: int,
    height_px: int,
    cursor: tuple[int, int] | None = None,
    offered: Tool | None = None,
    scale: tuple[int, int] = (MAX_COORDINATE, MAX_COORDINATE),
) -> actions.Action | actions.Finish | ParseFailure:
    """Parse a tool call into an action in pixels of the screenshot that it refers to.

    `cursor` is the position of the mouse in pixels, if known: drags start there, and so does scrolling by wheel.
    `offered` is the tool that the model was given, if it is not one of ours; `scale` is how far its coordinates reach.
    """
    tool = offered if offered is not None and offered.name == call.name else _TOOLS.get(call.name)
    if tool is None:
        return ParseFailure(kind="tool_name", message=f"There is no tool {call.name!r}. Tools: {', '.join(_TOOLS)}.")
    try:
        try:
            values: object = json.loads(call.arguments)
        except ValueError as error:
            raise _BadArguments(f"The arguments are no JSON ({error}). {_EXPECTED_OBJECT}") from None
        if not is_object(values):
            raise _BadArguments(f"The arguments are {call.arguments!r}. {_EXPECTED_OBJECT}")
        arguments = _Arguments(values=values, width_px=width_px, height_px=height_px, cursor=cursor, scale=scale)
        action, names = values.get("action"), action_names(tool)
        if not isinstance(action, str) or action not in names:
            raise _BadArguments(f"action is {action!r}. Expected one of {', '.join(names)}.")
        known = mapping(tool.parameters["properties"])
        if unknown := sorted(values.keys() - known.keys()):
            raise _BadArguments(f"There is no argument {unknown[0]!r}. Arguments: {', '.join(known)}.")
        return _MAKERS[call.name][action](arguments)
    except _BadArguments as error:
        return ParseFailure(kind="tool_arguments", message=str(error))
    except RecursionError:
        return ParseFailure(kind="tool_arguments", message=f"The arguments are nested too deeply. {_EXPECTED_OBJECT}")


def action_names(tool: Tool) -> list[str]:
    """The actions that a tool offers."""
    return [str(name) for name in sequence(mapping(mapping(tool.parameters["properties"])["action"])["enum"])]


def _point(arguments: _Arguments, name: str = "coordinate") -> tuple[int, int]:
    """Coordinates to a pixel: 0 is the first one; the end of the scale lies beyond the last and is clamped to it."""
    value, (max_x, max_y) = arguments.values.get(name), arguments.scale
    given = sequence(value)
    numbers = [number for number in given if isinstance(number, int | float) and not isinstance(number, bool)]
    if len(given) != 2 or len(numbers) != 2 or not (0 <= numbers[0] <= max_x and 0 <= numbers[1] <= max_y):
        numbers_are = f"two numbers from 0 to {max_x}" if max_x == max_y else f"x to {max_x} and y to {max_y}"
        raise _BadArguments(f"{name} is {value!r}. Expected {name}: [x, y], {numbers_are}.")
    x, y = numbers
    return (
        min(round(x * arguments.width_px / max_x), arguments.width_px - 1),
        min(round(y * arguments.height_px / max_y), arguments.height_px - 1),
    )


def _text(arguments: _Arguments) -> str:
    value = arguments.values.get("text")
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise _BadArguments(f"text is {value!r}. Expected text: a string of valid Unicode.")
    return value


def _number(arguments: _Arguments, name: str, default: float | None = None) -> float:
    value = arguments.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
        raise _BadArguments(f"{name} is {value!r}. Expected {name}: a number.")
    try:
        return float(value)
    except OverflowError:  # integers of any size are valid JSON
        raise _BadArguments(f"{name} is too large. Expected {name}: a number.") from None


def _seconds(arguments: _Arguments, default: float) -> float:
    seconds = _number(arguments, "time", default)
    if not 0 <= seconds <= MAX_WAIT_S:
        raise _BadArguments(f"time is {seconds:g}. Expected time: 0 to {MAX_WAIT_S:g} seconds.")
    return seconds


def _at(
    kind: type[actions.Click] | type[actions.DoubleClick] | type[actions.RightClick] | type[actions.MoveMouse],
) -> "_Maker":
    """Makes an action that needs only a point."""

    def maker(arguments: _Arguments) -> actions.Action:
        x, y = _point(arguments)
        return kind(x=x, y=y)

    return maker


def _long_press(arguments: _Arguments) -> actions.Action:
    x, y = _point(arguments)
    return actions.LongPress(x=x, y=y, duration_s=_seconds(arguments, 1.0))


def _swipe(arguments: _Arguments) -> actions.Action:
    x, y = _point(arguments)
    to_x, to_y = _point(arguments, "coordinate2")
    return actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y)


def _left_click_drag(arguments: _Arguments) -> actions.Action:
    if arguments.cursor is None:
        raise _BadArguments("left_click_drag starts at the cursor, which has not moved yet: call mouse_move first.")
    x, y = arguments.cursor
    to_x, to_y = _point(arguments)
    return actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y)


def _scroll(arguments: _Arguments) -> actions.Action:
    if "coordinate" in arguments.values:
        x, y = _point(arguments)
    else:
        x, y = arguments.cursor or (arguments.width_px // 2, arguments.height_px // 2)
    pixels = _number(arguments, "pixels")
    if abs(pixels) > MAX_SCROLL_PX:
        raise _BadArguments(f"pixels is {pixels:g}. Expected pixels: {-MAX_SCROLL_PX} to {MAX_SCROLL_PX}.")
    if arguments.values["action"] == "hscroll":
        return actions.Scroll(x=x, y=y, right_px=round(pixels))
    return actions.Scroll(x=x, y=y, down_px=-round(pixels))


def _type(arguments: _Arguments) -> actions.Action:
    text = _text(arguments)
    if len(text) > MAX_TYPED_CHARACTERS:
        raise _BadArguments(f"text has {len(text)} characters. Expected at most {MAX_TYPED_CHARACTERS} to type.")
    return actions.TypeText(text=text)


def _key(arguments: _Arguments) -> actions.Action:
    keys = arguments.values.get("keys")
    names = tuple(name for name in sequence(keys) if isinstance(name, str) and name)
    if not 0 < len(names) == len(sequence(keys)):
        raise _BadArguments(f'keys is {keys!r}. Expected keys: a list of names such as ["ctrl", "s"].')
    return actions.PressKey(keys=names)


def _phone_key(arguments: _Arguments) -> actions.Action:
    name = _text(arguments).lower().removeprefix("keycode_")
    is_button = name in set(actions.Button)
    return actions.PressButton(button=actions.Button(name)) if is_button else actions.PressKey(keys=(name,))


def _system_button(arguments: _Arguments) -> actions.Action:
    button = arguments.values.get("button")
    action = _SYSTEM_BUTTONS.get(button.lower()) if isinstance(button, str) else None
    if action is None:
        raise _BadArguments(f"button is {button!r}. Expected button: Back, Home, Menu or Enter.")
    return action


def _wait(arguments: _Arguments) -> actions.Action:
    return actions.Wait(duration_s=_seconds(arguments, 1.0))


def _answer(arguments: _Arguments) -> actions.Finish:
    return actions.Finish(success_claimed=True, answer=_text(arguments))


def _terminate(arguments: _Arguments) -> actions.Finish:
    status = arguments.values.get("status")
    if status not in ("success", "failure"):
        raise _BadArguments(f"status is {status!r}. Expected status: success or failure.")
    return actions.Finish(success_claimed=status == "success")


_TOOLS = {tool.name: tool for tool in (MOBILE_USE, COMPUTER_USE)}
_Maker = Callable[[_Arguments], actions.Action | actions.Finish]
_MAKERS: Mapping[str, Mapping[str, _Maker]] = {
    MOBILE_USE.name: {
        "click": _at(actions.Click),
        "long_press": _long_press,
        "swipe": _swipe,
        "type": _type,
        "answer": _answer,
        "system_button": _system_button,
        "wait": _wait,
        "terminate": _terminate,
        "key": _phone_key,
        "open": lambda arguments: actions.OpenApp(name=_text(arguments)),
    },
    COMPUTER_USE.name: {
        "key": _key,
        "type": _type,
        "mouse_move": _at(actions.MoveMouse),
        "left_click": _at(actions.Click),
        "left_click_drag": _left_click_drag,
        "right_click": _at(actions.RightClick),
        "double_click": _at(actions.DoubleClick),
        "scroll": _scroll,
        "wait": _wait,
        "terminate": _terminate,
        "answer": _answer,
        "drag": _swipe,
        "hscroll": _scroll,
    },
}
"""Of all formats; a tool offers some of them."""

ACTION_NAMES: Mapping[str, frozenset[str]] = {name: frozenset(action_names(tool)) for name, tool in _TOOLS.items()}
"""The actions of each of our tools, by the tool's name."""
