"""Tools without coordinates: the model describes an element, and a coordinate model finds it on the screenshot.

`mobile_act` operates phones, `computer_act` desktops and browsers. Actions without a target (typing, keys, waiting,
ending) are the same as in the tools with coordinates.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from cua_rl.agent.tools import COMPUTER_USE, MAX_WAIT_S, MOBILE_USE, parse_action
from cua_rl.environments.device import ActionRejected, Direction, Grounder, Pixel
from cua_rl.types.actions import Action, Click, DoubleClick, Drag, Finish, LongPress, MoveMouse, RightClick, Scroll
from cua_rl.types.conversation import EncodedImage, ParseFailure, Tool, ToolCall
from cua_rl.types.json_values import mapping, sequence

_Found = TypeVar("_Found")

_TARGET = {
    "type": "string",
    "description": "the element to act on in words: its kind and text; colour, size or place where several are alike",
}
_DIRECTION = {
    "type": "string",
    "enum": ["up", "down", "left", "right"],
    "description": "scroll: where to look; down shows what is below",
}


def _element_tool(name: str, base: Tool, pointing: Mapping[str, str]) -> Tool:
    """The tool of `base` with elements instead of coordinates; `pointing` are its actions that need an element."""
    properties = mapping(base.parameters["properties"])
    others = [action for action in sequence(mapping(properties["action"])["enum"]) if action in _PLACELESS]
    kept = {key: value for key, value in properties.items() if key in ("text", "keys", "button", "status", "time")}
    return Tool(
        name=name,
        description="Do one action. Say in words what to act on: it is found on the screenshot.",
        parameters={
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": [*pointing, *others]},
                "target": _TARGET,
                "destination": {"type": "string", "description": "the element where a drag or swipe ends"},
                "direction": _DIRECTION,
                **kept,
            },
            "required": ["action"],
        },
    )


_PLACELESS = ("type", "key", "system_button", "wait", "answer", "terminate")
_MOBILE = {"click": "target", "long_press": "target", "swipe": "both", "scroll": "direction"}
_COMPUTER = {
    "left_click": "target",
    "right_click": "target",
    "double_click": "target",
    "mouse_move": "target",
    "left_click_drag": "both",
    "scroll": "direction",
}
MOBILE_ACT = _element_tool("mobile_act", MOBILE_USE, _MOBILE)
COMPUTER_ACT = _element_tool("computer_act", COMPUTER_USE, _COMPUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointAt:
    """An action at one element."""

    target: str
    make: Callable[[Pixel], Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class DragBetween:
    """A drag from one element to another."""

    target: str
    destination: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrollAt:
    """Scrolling an element to see what lies in `direction`."""

    target: str
    direction: Direction


Aim = PointAt | DragBetween | ScrollAt


def parse_element_action(call: ToolCall) -> Aim | Action | Finish | ParseFailure:
    """Parse a tool call into its target, or directly into an action if it needs none."""
    known = {MOBILE_ACT.name: (_MOBILE, MOBILE_USE), COMPUTER_ACT.name: (_COMPUTER, COMPUTER_USE)}
    if call.name not in known:
        return ParseFailure(kind="tool_name", message=f"There is no tool {call.name!r}. Tools: {', '.join(known)}.")
    pointing, base = known[call.name]
    try:
        given: object = json.loads(call.arguments)
    except (ValueError, RecursionError):
        given = None
    values = mapping(given)
    action = values.get("action")
    if not isinstance(action, str) or action not in (*pointing, *_PLACELESS):
        return _bad(f"Expected an object whose action is one of {', '.join((*pointing, *_PLACELESS))}.", call.arguments)
    schema = (MOBILE_ACT if base is MOBILE_USE else COMPUTER_ACT).parameters
    if unknown := sorted(values.keys() - mapping(schema["properties"]).keys()):
        return _bad(f"Expected only arguments of {call.name}, there is no {unknown[0]!r}.", call.arguments)
    if action in _PLACELESS:
        return parse_action(replace(call, name=base.name), width_px=1, height_px=1)
    return _parse_aim(action, pointing[action], values)


def _parse_aim(action: str, needs: str, values: Mapping[str, object]) -> Aim | ParseFailure:
    target = describe(values.get("target"))
    if target is None:
        return _bad('Expected target: the element in words, such as "Save button".', values.get("target"))
    if needs == "both":
        destination = describe(values.get("destination"))
        if destination is None:
            return _bad("Expected destination: the element where it ends, in words.", values.get("destination"))
        return DragBetween(target=target, destination=destination)
    if needs == "direction":
        direction = values.get("direction")
        if direction not in ("up", "down", "left", "right"):
            return _bad("Expected direction: up, down, left or right.", direction)
        return ScrollAt(target=target, direction=direction)
    time = values.get("time", 1.0)
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= MAX_WAIT_S:
        return _bad(f"Expected time: 0 to {MAX_WAIT_S:g} seconds.", time)
    makers: Mapping[str, Callable[[Pixel], Action]] = {
        "click": lambda at: Click(x=at[0], y=at[1]),
        "left_click": lambda at: Click(x=at[0], y=at[1]),
        "right_click": lambda at: RightClick(x=at[0], y=at[1]),
        "double_click": lambda at: DoubleClick(x=at[0], y=at[1]),
        "mouse_move": lambda at: MoveMouse(x=at[0], y=at[1]),
        "long_press": lambda at: LongPress(x=at[0], y=at[1], duration_s=float(time)),
    }
    return PointAt(target=target, make=makers[action])


def describe(target: object) -> str | None:
    """One line for the coordinate model, None if there is no description: "Save button, labelled Save, blue"."""
    if isinstance(target, str):
        return target.strip() or None
    parts = {key: value for key, value in mapping(target).items() if isinstance(value, str)}
    if not parts.get("element", "").strip():
        return None
    label = f"labelled {parts['label']}" if parts.get("label") else ""
    more = (parts.get(name, "") for name in ("color", "size", "shape", "location"))
    return ", ".join(part.strip() for part in (parts["element"], label, *more) if part.strip())


def _bad(expected: str, came: object) -> ParseFailure:
    return ParseFailure(kind="tool_arguments", message=f"Got {came!r}. {expected}")


async def resolve(aim: Aim, seen: EncodedImage, grounder: Grounder) -> Action:
    """The action in pixels of the screenshot.

    Raises:
        ActionRejected: the element is not there; the message is for the model.
        DeviceError: the grounder's model did not answer.
    """
    match aim:
        case PointAt(target=target, make=make):
            return make(_inside(_found(await grounder.find(seen, target), target), seen))
        case DragBetween(target=target, destination=destination):
            ends = _found(await grounder.find_drag(seen, target, destination), f"{target} or {destination}")
            (x, y), (to_x, to_y) = (_inside(end, seen) for end in ends)
            return Drag(x=x, y=y, to_x=to_x, to_y=to_y)
        case ScrollAt(target=target, direction=direction):
            at, distance_px = _found(await grounder.find_scroll(seen, target, direction), target)
            x, y = _inside(at, seen)
            # by the distance of the coordinate model, else half a screen, in the direction of the call
            vertical = direction in ("up", "down")
            amount = abs(distance_px) or (seen.height_px if vertical else seen.width_px) // 2
            signed = amount if direction in ("down", "right") else -amount
            return Scroll(x=x, y=y, down_px=signed if vertical else 0, right_px=0 if vertical else signed)


def _found(place: _Found | None, target: str) -> _Found:
    if place is None:
        raise ActionRejected(f"There is no {target!r} on the screen. Describe something that the screenshot shows.")
    return place


def _inside(pixel: Pixel, seen: EncodedImage) -> Pixel:
    return min(pixel[0], seen.width_px - 1), min(pixel[1], seen.height_px - 1)
