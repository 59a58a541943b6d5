"""The computer tools of OpenAI and Anthropic, for agents that are written for them.

The policy sees the function `computer_use` in its own relative coordinates. Its calls become `computer_call` items or
`tool_use` blocks with actions in pixels: of the display that the agent declares, or of the last screenshot (OpenAI's
`computer`).

An agent cannot be told that a call is malformed. It is asked for a screenshot instead, and the policy reads with it
what was wrong; the turn's `failure` counts it, as for the built-in agent.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cua_rl.agent.tools import COMPUTER_USE, MAX_WAIT_S, MOBILE_USE, function_tool, parse_action
from cua_rl.environments.key_names import openai_key, x11_key
from cua_rl.renderers.openai_fields import FieldPath, list_at, mapping_at
from cua_rl.types.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    Finish,
    MoveMouse,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.conversation import EncodedImage, Item, Message, ParsedAnswer, ParseFailure, ToolCall, ToolResult
from cua_rl.types.json_values import Json, JsonDict, is_array, mapping, sequence

_CALL = "computer"
"""The name of Anthropic's tool, and what our items call a `computer_call`, whose arguments are {"actions": [...]}."""

_PROPERTIES = mapping(COMPUTER_USE.parameters["properties"])
_ACTION = mapping(_PROPERTIES["action"])
_AT_A_POINT = ("triple_click", "middle_click")
_MORE_OF_ANTHROPIC = (*_AT_A_POINT, "left_mouse_down", "left_mouse_up", "hold_key")
_MAX_SIDE = 65_536
"""Pixels of a declared display, more than any has."""
_PX_PER_CLICK = 50
"""How far one click of the wheel is taken to scroll, as on our desktops."""
_NO_SCREENSHOT = "There is no screenshot yet, to which coordinates would refer: call screenshot first."


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputerTool:
    """The tool as a request declares it."""

    kind: Literal["preview", "current", "anthropic"]
    size: tuple[int, int] | None
    """Width and height of the display in pixels; None is that of the last screenshot."""
    zooms: bool = False
    """Whether the agent shows a part of the screen enlarged."""

    @classmethod
    def find(cls, request: Json) -> "ComputerTool | None":
        """The computer tool of a Responses request, if it has one; raises `RequestError` for a display without size."""
        for index, tool in enumerate(sequence(request.get("tools"))):
            fields = mapping(tool)
            if (kind := _kind_of(fields)) is None:
                continue
            if kind == "current":
                return cls(kind=kind, size=None)
            names = [f"display_{side}{'_px' if kind == 'anthropic' else ''}" for side in ("width", "height")]
            width, height = (fields.get(name) for name in names)
            if type(width) is int and type(height) is int and 0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE:
                return cls(kind=kind, size=(width, height), zooms=fields.get("enable_zoom") is True)
            wanted = f"{' and '.join(names)} from 1 to {_MAX_SIDE}"
            raise FieldPath(f"tools[{index}]").error(wanted, (width, height), "send both")
        return None

    def read(self, request: Json, failures: Mapping[str, str]) -> Json:
        """The request with functions in place of computer tool, calls and outputs.

        `failures` says by call id what was wrong with earlier calls.
        """
        given_tools = sequence(request.get("tools"))
        if any(mapping(tool).get("name") == _CALL and _kind_of(mapping(tool)) is None for tool in given_tools):
            raise FieldPath("tools").error(f"no function named {_CALL!r} beside the computer tool", "one", "rename it")
        tools = [self._offered() if _kind_of(mapping(tool)) is not None else tool for tool in given_tools]
        given = request.get("input")
        if is_array(given):
            given = [_read_item(item, failures, FieldPath(f"input[{index}]")) for index, item in enumerate(given)]
        choice = mapping(request.get("tool_choice"))
        if _kind_of(choice) is not None or (choice.get("type"), choice.get("name")) == ("function", _CALL):
            request = {**request, "tool_choice": {"type": "function", "name": COMPUTER_USE.name}}
        return {**request, "tools": tools, "input": given}

    def answer(self, parsed: ParsedAnswer, items: Sequence[Item], earlier: Iterable[ToolCall]) -> ParsedAnswer:
        """The policy's answer to `items` as the agent gets it: all calls of the tool in one, or of the preview tool one
        each. `earlier` are the calls of the rollout so far, which have left the mouse somewhere.
        """
        size, cursor = self.size or _last_size(items), _last_cursor(earlier)
        actions, others = list[JsonDict](), list[ToolCall]()
        text, failure = parsed.text, parsed.failure
        for call in parsed.tool_calls:
            if call.name != COMPUTER_USE.name:
                others.append(call)
                continue
            read = self._read_call(call, size, cursor)
            if isinstance(read, Finish):
                text = "\n".join(filter(None, (text, read.answer or ("done" if read.success_claimed else "failed"))))
                continue
            if isinstance(read, ParseFailure):
                failure = failure or read
            actions.append({"type": "screenshot"} if isinstance(read, ParseFailure) else read)
            cursor = _cursor_after(actions[-1]) or cursor
        if failure is not None and not (actions or others):
            actions.append({"type": "screenshot"})  # an answer without a call would end the agent
        if self.kind == "anthropic":
            arguments = [_write_for_anthropic(action) for action in actions]
        else:
            parts = [actions] if self.kind == "current" else [[action] for action in actions]
            arguments = [{"actions": part} for part in parts if part]
        calls = [ToolCall(call_id="", name=_CALL, arguments=json.dumps(one)) for one in arguments]
        return replace(parsed, text=text, tool_calls=(*calls, *others), failure=failure)

    def write(self, output: Sequence[JsonDict]) -> list[JsonDict]:
        """Output items of a Response with `computer_call` items in place of calls."""
        return [self._write_item(item) for item in output]

    def _write_item(self, item: JsonDict) -> JsonDict:
        if item["type"] != "function_call" or item["name"] != _CALL:
            return item
        actions = json.loads(item["arguments"])["actions"]
        done: JsonDict = {"actions": actions} if self.kind == "current" else {"action": actions[0]}
        kept = {name: item[name] for name in ("id", "call_id", "status")}
        return {"type": "computer_call", **kept, **done, "pending_safety_checks": []}

    def _offered(self) -> Json:
        names = ["screenshot", *(_MORE_OF_ANTHROPIC if self.kind == "anthropic" else ()), *["zoom"] * self.zooms]
        properties: JsonDict = {**_PROPERTIES, "action": {**_ACTION, "enum": [*sequence(_ACTION["enum"]), *names]}}
        if self.zooms:
            properties["coordinate2"] = {**mapping(_PROPERTIES["coordinate"]), "description": "where zoom's area ends"}
        parameters = {**COMPUTER_USE.parameters, "properties": properties}
        return function_tool(replace(COMPUTER_USE, parameters=parameters))

    def _read_call(
        self, call: ToolCall, size: tuple[int, int] | None, cursor: tuple[int, int] | None
    ) -> JsonDict | Finish | ParseFailure:
        """The action of a call of the policy as OpenAI writes it; those that only Anthropic has look alike."""
        try:
            arguments = mapping(json.loads(call.arguments))
        except (ValueError, RecursionError):
            arguments = dict[str, object]()
        name = arguments.get("action")
        if name == "screenshot":
            return {"type": "screenshot"}
        is_more = self.kind == "anthropic" and isinstance(name, str) and name in _MORE_OF_ANTHROPIC
        if is_more and name in ("left_mouse_down", "left_mouse_up"):
            return {"type": name}
        if is_more:  # read as one that has the same arguments
            alike = "left_click" if name in _AT_A_POINT else "key"
            call = replace(call, arguments=json.dumps({**arguments, "action": alike}))
        if self.zooms and name == "zoom":  # a swipe has two points
            swipe = json.dumps({**arguments, "action": "swipe"})
            call = replace(call, name=MOBILE_USE.name, arguments=swipe)
        width_px, height_px = size or (1, 1)
        action = parse_action(call, width_px=width_px, height_px=height_px, cursor=cursor)
        if isinstance(action, Finish | ParseFailure):
            return action
        written = _write_action(action)
        if size is None and ("x" in written or "path" in written):
            return ParseFailure(kind="tool_arguments", message=_NO_SCREENSHOT)
        if name == "hold_key":
            seconds = arguments.get("time")
            written["duration"] = min(max(seconds, 0), MAX_WAIT_S) if isinstance(seconds, int | float) else 1
        if isinstance(action, Wait) and self.kind == "anthropic":
            written["duration"] = action.duration_s
        return {**written, "type": name} if is_more or (self.zooms and name == "zoom") else written


def _kind_of(tool: Json) -> Literal["preview", "current", "anthropic"] | None:
    """The kind of a computer tool; None for another tool."""
    match tool.get("type"):
        case "computer_use_preview" | "computer-preview":  # the second by OpenAI's sample app
            return "preview"
        case "computer":
            return "current"
        case str(kind) if kind.startswith("computer_20"):  # a date
            return "anthropic"
        case _:
            return None


def _read_item(item: object, failures: Mapping[str, str], at: FieldPath) -> object:
    fields = mapping(item)
    call_id = fields.get("call_id")
    match fields.get("type"):
        case "computer_call":
            actions = fields.get("actions")
            actions = [fields.get("action")] if actions is None else list_at(actions, at / "actions")
            arguments = json.dumps({"actions": [_known(mapping_at(action, at / "action")) for action in actions]})
            return {"type": "function_call", "call_id": call_id, "name": _CALL, "arguments": arguments}
        case "function_call_output" if isinstance(call_id, str) and call_id in failures:
            given = fields.get("output")
            shown = [{"type": "input_text", "text": given}] if isinstance(given, str) else sequence(given)
            return {**fields, "output": [{"type": "input_text", "text": failures[call_id]}, *shown]}
        case "computer_call_output":
            screen = mapping_at(fields.get("output"), at / "output")
            parts: list[JsonDict] = [{"type": "input_image", "image_url": screen.get("image_url")}]
            if isinstance(fields.get("current_url"), str):
                parts.insert(0, {"type": "input_text", "text": f"URL: {fields['current_url']}"})
            if isinstance(call_id, str) and call_id in failures:
                parts.insert(0, {"type": "input_text", "text": failures[call_id]})
            return {"type": "function_call_output", "call_id": call_id, "output": parts}
        case _:
            return item


def _known(action: Json) -> JsonDict:
    """An action without the empty fields that client libraries add."""
    return {name: value for name, value in action.items() if value is not None}


def _write_action(action: Action) -> JsonDict:
    match action:
        case Click(x=x, y=y):
            return {"type": "click", "button": "left", "x": x, "y": y}
        case RightClick(x=x, y=y):
            return {"type": "click", "button": "right", "x": x, "y": y}
        case DoubleClick(x=x, y=y):
            return {"type": "double_click", "x": x, "y": y}
        case MoveMouse(x=x, y=y):
            return {"type": "move", "x": x, "y": y}
        case Drag(x=x, y=y, to_x=to_x, to_y=to_y):
            return {"type": "drag", "path": [{"x": x, "y": y}, {"x": to_x, "y": to_y}]}
        case Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            return {"type": "scroll", "x": x, "y": y, "scroll_x": right_px, "scroll_y": down_px}
        case TypeText(text=text):
            return {"type": "type", "text": text}
        case PressKey(keys=keys):
            return {"type": "keypress", "keys": [*map(openai_key, keys)]}
        case Wait():
            return {"type": "wait"}
        case _:
            raise AssertionError(f"unreachable: {COMPUTER_USE.name} has no {action!r}")


def _write_for_anthropic(action: JsonDict) -> JsonDict:
    """The input of Anthropic's tool for an action in the form of OpenAI's."""
    match action:
        case {"type": "click", "button": button, "x": x, "y": y}:
            return {"action": f"{button}_click", "coordinate": [x, y]}
        case {"type": "move", "x": x, "y": y}:
            return {"action": "mouse_move", "coordinate": [x, y]}
        case {"type": "zoom", "path": [start, end]}:
            return {"action": "zoom", "region": [start["x"], start["y"], end["x"], end["y"]]}
        case {"type": "drag", "path": [start, end]}:
            return {
                "action": "left_click_drag",
                "start_coordinate": [start["x"], start["y"]],
                "coordinate": [end["x"], end["y"]],
            }
        case {"type": "scroll", "x": x, "y": y, "scroll_y": down_px}:
            clicks = max(round(abs(down_px) / _PX_PER_CLICK), min(abs(down_px), 1))
            where = {"action": "scroll", "coordinate": [x, y], "scroll_direction": "down" if down_px >= 0 else "up"}
            return {**where, "scroll_amount": clicks}
        case {"type": "keypress", "keys": keys}:
            return {"action": "key", "text": "+".join(map(x11_key, keys))}
        case {"type": "hold_key", "keys": keys, "duration": duration}:
            return {"action": "hold_key", "text": "+".join(map(x11_key, keys)), "duration": duration}
        case {"type": name, "x": x, "y": y}:
            return {"action": name, "coordinate": [x, y]}
        case {"type": name, **more}:
            return {"action": name, **more}
        case _:
            raise AssertionError(f"unreachable: no action has no type, got {action!r}")


def _last_size(items: Sequence[Item]) -> tuple[int, int] | None:
    """The size of the last screenshot in a conversation."""
    contents = [item.content for item in items if isinstance(item, Message | ToolResult)]
    images = [part for content in contents for part in content if isinstance(part, EncodedImage)]
    return (images[-1].width_px, images[-1].height_px) if images else None


def _last_cursor(calls: Iterable[ToolCall]) -> tuple[int, int] | None:
    """Where the last of the agent's calls left the mouse."""
    cursor = None
    for call in calls:
        if call.name == _CALL:
            given = mapping(json.loads(call.arguments))
            for action in sequence(given.get("actions", [given])):
                cursor = _cursor_after(mapping(action)) or cursor
    return cursor


def _cursor_after(action: Json) -> tuple[int, int] | None:
    if action.get("type") == "zoom":  # looks at a part of the screen
        return None
    path = sequence(action.get("path"))
    place = mapping(path[-1]) if path else action
    pair = sequence(place.get("coordinate"))  # Anthropic's
    x, y = pair if len(pair) == 2 else (place.get("x"), place.get("y"))
    return (x, y) if isinstance(x, int) and isinstance(y, int) else None
