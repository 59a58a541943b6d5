"""The computer tool of OpenAI's Responses API, for agents that are written for it.

The policy sees the function `computer_use` in its own relative coordinates. Its calls become `computer_call` items with
actions in pixels: of the display that the agent declares (`computer_use_preview`), or of the last screenshot
(`computer`).

An agent cannot be told that a call is malformed. It is asked for a screenshot instead, and the policy reads with it
what was wrong; the turn's `failure` counts it, as for the built-in agent.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cua_rl.agent.tools import COMPUTER_USE, function_tool, parse_action
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
from cua_rl.types.json_values import Json, JsonDict, is_array, is_object, mapping, sequence

PREVIEW, CURRENT = "computer_use_preview", "computer"
"""Types of the tool: one action in a call, or a list of them."""

_CALL = "computer"
"""What our items call a `computer_call`, whose arguments are {"actions": [...]}."""

_PROPERTIES = mapping(COMPUTER_USE.parameters["properties"])
_ACTION = mapping(_PROPERTIES["action"])
_OFFERED = replace(
    COMPUTER_USE,
    parameters={
        **COMPUTER_USE.parameters,
        "properties": {**_PROPERTIES, "action": {**_ACTION, "enum": [*sequence(_ACTION["enum"]), "screenshot"]}},
    },
)
_NO_SCREENSHOT = "There is no screenshot yet, to which coordinates would refer: call screenshot first."


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputerTool:
    """The tool as a request declares it."""

    kind: str
    size: tuple[int, int] | None
    """Width and height of the display in pixels; None is that of the last screenshot."""

    @classmethod
    def find(cls, request: Json) -> "ComputerTool | None":
        """The computer tool of a Responses request, if it has one; raises `RequestError` for a display without size."""
        for index, tool in enumerate(sequence(request.get("tools"))):
            fields = mapping(tool)
            kind = fields.get("type")
            if kind == CURRENT:
                return cls(kind=CURRENT, size=None)
            if kind == PREVIEW:
                width, height = fields.get("display_width"), fields.get("display_height")
                if not (isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0):
                    raise FieldPath(f"tools[{index}]").error(
                        "display_width and display_height in pixels", (width, height), "send both"
                    )
                return cls(kind=PREVIEW, size=(width, height))
        return None

    def read(self, request: Json, failures: Mapping[str, str]) -> Json:
        """The request with functions in place of computer tool, calls and outputs.

        `failures` says by call id what was wrong with earlier calls.
        """
        tools = [
            function_tool(_OFFERED) if mapping(tool).get("type") in (PREVIEW, CURRENT) else tool
            for tool in sequence(request.get("tools"))
        ]
        given = request.get("input")
        if is_array(given):
            given = [_read_item(item, failures, FieldPath(f"input[{index}]")) for index, item in enumerate(given)]
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
            read = _read_call(call, size, cursor)
            if isinstance(read, Finish):
                text = "\n".join(filter(None, (text, read.answer or ("done" if read.success_claimed else "failed"))))
                continue
            if isinstance(read, ParseFailure):
                failure = failure or read
            actions.append({"type": "screenshot"} if isinstance(read, ParseFailure) else read)
            cursor = _cursor_after(actions[-1]) or cursor
        if failure is not None and not (actions or others):
            actions.append({"type": "screenshot"})  # an answer without a call would end the agent
        parts = [actions] if self.kind == CURRENT else [[action] for action in actions]
        calls = [
            ToolCall(call_id="", name=_CALL, arguments=json.dumps({"actions": part})) for part in filter(None, parts)
        ]
        return replace(parsed, text=text, tool_calls=(*calls, *others), failure=failure)

    def write(self, output: Sequence[JsonDict]) -> list[JsonDict]:
        """Output items of a Response with `computer_call` items in place of calls."""
        return [self._write_item(item) for item in output]

    def _write_item(self, item: JsonDict) -> JsonDict:
        if item["type"] != "function_call" or item["name"] != _CALL:
            return item
        actions = json.loads(item["arguments"])["actions"]
        done: JsonDict = {"actions": actions} if self.kind == CURRENT else {"action": actions[0]}
        kept = {name: item[name] for name in ("id", "call_id", "status")}
        return {"type": "computer_call", **kept, **done, "pending_safety_checks": []}


def _read_item(item: object, failures: Mapping[str, str], at: FieldPath) -> object:
    fields = mapping(item)
    call_id = fields.get("call_id")
    match fields.get("type"):
        case "computer_call":
            actions = fields.get("actions")
            actions = [fields.get("action")] if actions is None else list_at(actions, at / "actions")
            arguments = json.dumps({"actions": [_known(mapping_at(action, at / "action")) for action in actions]})
            return {"type": "function_call", "call_id": call_id, "name": _CALL, "arguments": arguments}
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


def _read_call(
    call: ToolCall, size: tuple[int, int] | None, cursor: tuple[int, int] | None
) -> JsonDict | Finish | ParseFailure:
    """The action of a call of the policy as OpenAI writes it."""
    try:
        arguments: object = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if is_object(arguments) and arguments.get("action") == "screenshot":
        return {"type": "screenshot"}
    width_px, height_px = size or (1, 1)
    action = parse_action(call, width_px=width_px, height_px=height_px, cursor=cursor)
    if isinstance(action, Finish | ParseFailure):
        return action
    written = _write_action(action)
    if size is None and ("x" in written or "path" in written):
        return ParseFailure(kind="tool_arguments", message=_NO_SCREENSHOT)
    return written


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
            return {"type": "keypress", "keys": list(keys)}
        case Wait():
            return {"type": "wait"}
        case _:
            raise AssertionError(f"unreachable: {COMPUTER_USE.name} has no {action!r}")


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
            for action in json.loads(call.arguments)["actions"]:
                cursor = _cursor_after(action) or cursor
    return cursor


def _cursor_after(action: Json) -> tuple[int, int] | None:
    path = sequence(action.get("path"))
    place = mapping(path[-1]) if path else action
    x, y = place.get("x"), place.get("y")
    return (x, y) if isinstance(x, int) and isinstance(y, int) else None
