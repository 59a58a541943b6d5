"""Holo's action format: an answer is one JSON object with a note, a thought and a call, not a tool call.

Holo1.5 acts on web pages in pixels of the screenshot as it sees it (github.com/hcompai/surfer-h-cli,
`skills/navigation_models.py`; github.com/hcompai/hai-cookbook, `utils/navigation.py`), Holo3 on any device from 0 to
1000 (hub.hcompany.ai/agent-loop).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cua_rl.agent.action_format import Parsed, ScreenAnswer, extended, reach
from cua_rl.agent.history import system_item, user_item
from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE, load_system_prompt, parse_action
from cua_rl.environments.device import DeviceKind
from cua_rl.renderers.images import ImageSettings
from cua_rl.types.actions import Action, Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure, ToolCall
from cua_rl.types.json_values import Json, JsonDict, mapping, sequence

_PX_PER_CLICK = 50
"""How far one click of the wheel is taken to scroll, as on our desktops."""
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)

_TEXT, _WHOLE, _FLAG = ({"type": kind} for kind in ("string", "integer", "boolean"))
_AT: JsonDict = {"element": _TEXT, "x": _WHOLE, "y": _WHOLE}
_WRITTEN: JsonDict = {"content": _TEXT, "press_enter": _FLAG, "overwrite": _FLAG}
_DIRECTION: JsonDict = {"direction": {"enum": ["up", "down", "left", "right"]}}
_OPTIONAL = ("press_enter", "overwrite", "button", "scroll_size")
_HOLO1_5: Mapping[str, JsonDict] = {
    "click_element": _AT,
    "write_element": {"content": _TEXT, **_AT},
    "scroll": _DIRECTION,
    "go_back": {},
    "wait": {},
    "answer": {"content": _TEXT},
}
_HOLO3: Mapping[str, JsonDict] = {
    "write": _WRITTEN,
    "click": {**_AT, "button": {"enum": ["left", "right"]}},
    "double_click": _AT,
    "write_at": {**_WRITTEN, **_AT},
    "scroll": {**_AT, **_DIRECTION, "scroll_size": _WHOLE},
    "move_to": _AT,
    "drag_and_drop": {"description": _TEXT, "x1": _WHOLE, "y1": _WHOLE, "x2": _WHOLE, "y2": _WHOLE},
    "hotkey": {"keys": {"type": "array", "items": _TEXT}},
    "wait": {"seconds": {"type": "number"}},
    "answer": {"content": _TEXT},
}
"""What may be called, with its arguments; on desktops, most names of Holo3 end in `_desktop`."""
_FOR_PEOPLE = ("element", "description")
_SAME_ON_DESKTOPS = ("drag_and_drop", "answer")
_POINTED = {"click_element": "left_click", "double_click": "double_click", "move_to": "mouse_move"}
_HANDS = extended(COMPUTER_USE, "hscroll", "drag", coordinate2="where a drag ends")
"""The tool as whose calls Holo's are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holo:
    """The format of Holo3, or of Holo1.5 with the settings with which its screenshots are resized."""

    pixels_of: ImageSettings | None = None

    @property
    def _names(self) -> tuple[str, str]:
        """Where an answer has its call, and where a call has its name."""
        return ("tool_call", "tool_name") if self.pixels_of is None else ("action", "action")

    def _calls(self, kind: DeviceKind) -> dict[str, JsonDict]:
        if self.pixels_of is not None:
            return dict(_HOLO1_5)
        end = "_desktop" if kind == "linux" else ""
        return {name if name in _SAME_ON_DESKTOPS else name + end: known for name, known in _HOLO3.items()}

    def opening(self, kind: DeviceKind, instruction: str, image_url: str) -> list[Json]:
        """A system prompt with the schema of an answer, and the screen."""
        where, name = self._names
        calls = [
            {
                "type": "object",
                "properties": {name: {"const": call}, **arguments},
                "required": [name, *(argument for argument in arguments if argument not in _OPTIONAL)],
                "additionalProperties": False,
            }
            for call, arguments in self._calls(kind).items()
        ]
        note = {"type": ["string", "null"], "description": "what to remember of this screen, if anything"}
        parts = {"note": note, "thought": {**_TEXT, "description": "what to do next"}, where: {"anyOf": calls}}
        schema = json.dumps({"type": "object", "properties": parts, "required": [*parts]})
        device = load_system_prompt(kind).partition(" Answer")[0]
        unit = "from 0 to 1000" if self.pixels_of is None else "in pixels of the screenshot"
        prompt = f"{device} Answer each screenshot with one JSON object; x and y are {unit}."
        output = f"\n\n<output_format>\n```json\n{schema}\n```\n</output_format>"
        if self.pixels_of is None:
            return [system_item(f"{prompt}\n\nTask: {instruction}{output}"), self._observation("", image_url, 1)]
        return [system_item(prompt + output), self._observation(f"<task>\n{instruction}\n</task>\n", image_url, 1)]

    def tools(self, kind: DeviceKind, seen: EncodedImage) -> list[Json]:
        """None: the prompt has the schema."""
        return []

    def parse(self, answer: ScreenAnswer) -> Parsed:
        """The call in the object, as calls of our tools."""
        given, (where, name_at) = _read(answer.text), self._names
        call, calls = mapping(given.get(where)), self._calls(answer.kind)
        values, name = {key: value for key, value in call.items() if key != name_at}, call.get(name_at)
        if not call:
            return _failure("json", f"expected one JSON object with note, thought and {where}")
        if not isinstance(name, str) or name not in calls:
            return _failure("tool_name", f"there is no {name_at} {name!r}, only {', '.join(calls)}")
        if missing := [needed for needed in calls[name] if needed not in (*_OPTIONAL, *_FOR_PEOPLE, *values)]:
            return _failure("tool_arguments", f"{name} needs {missing[0]}")
        for argument, value in values.items():
            if argument not in calls[name]:
                known = ", ".join(calls[name]) or "none"
                return _failure("tool_arguments", f"{name} has no argument {argument!r}, only {known}")
            choices = sequence(calls[name][argument].get("enum"))
            if choices and value not in choices:
                return _failure("tool_arguments", f"{argument} is {value!r}, not one of {', '.join(map(str, choices))}")
        actions = list[Action]()
        for one in _meaning(name.removesuffix("_desktop"), values):
            tool = MOBILE_USE if one["action"] == "system_button" else COMPUTER_USE
            action = parse_action(
                ToolCall(call_id="", name=tool.name, arguments=json.dumps(one)),
                width_px=answer.seen.width_px,
                height_px=answer.seen.height_px,
                cursor=answer.cursor,
                offered=_HANDS,
                scale=reach(answer.seen, self.pixels_of),
            )
            if isinstance(action, Finish | ParseFailure):
                return action
            actions.append(action)
        return tuple(actions)

    def reply(self, answer: ScreenAnswer, error: str, image_url: str | None) -> list[Json]:
        """The output of the call, and the new screen."""
        where, name_at = self._names
        name = mapping(_read(answer.text).get(where)).get(name_at, "unknown")
        output = f'<tool_output tool="{name}">\n{error}\n</tool_output>' if error or self.pixels_of is None else ""
        return [user_item(output) if image_url is None else self._observation(output, image_url, answer.turn + 1)]

    def _observation(self, before: str, image_url: str, step: int) -> Json:
        begin, end = "<observation>\n", "\n</observation>"
        if self.pixels_of is not None:
            begin, end = f"<observation step={step}>\n<screenshot>\n", "\n</screenshot>\n\n</observation>\n"
        item = user_item(before + begin, image_url)
        return {**item, "content": [*sequence(item["content"]), {"type": "input_text", "text": end}]}


def _read(text: str) -> Json:
    """The object that a text is, in a code block or not; an empty one if it is none."""
    fenced = _FENCED.fullmatch(text.strip())
    try:
        return mapping(json.loads(text if fenced is None else fenced[1]))
    except (ValueError, RecursionError):
        return {}


def _meaning(name: str, values: Json) -> list[JsonDict]:
    """Arguments of our tools for a call; what is missing or of another type is left to their parsing."""
    at = {"coordinate": [values.get("x"), values.get("y")]}
    if name in _POINTED:
        return [{"action": _POINTED[name], **at}]
    match name:
        case "click":
            return [{"action": f"{values.get('button', 'left')}_click", **at}]
        case "write":
            content = values.get("content")
            typed = f"{content}\n" if values.get("press_enter") is True and isinstance(content, str) else content
            select = [{"action": "key", "keys": ["ctrl", "a"]}] if values.get("overwrite") is True else []
            return [*select, {"action": "type", "text": typed}]
        case "write_at" | "write_element":
            return [{"action": "left_click", **at}, *_meaning("write", values)]
        case "drag_and_drop":
            ends = [[values.get(f"{axis}{end}") for axis in "xy"] for end in (1, 2)]
            return [{"action": "drag", "coordinate": ends[0], "coordinate2": ends[1]}]
        case "hotkey":
            return [{"action": "key", "keys": values.get("keys")}]
        case "wait":
            return [{"action": "wait", "time": values.get("seconds", 2)}]
        case "go_back":
            return [{"action": "system_button", "button": "Back"}]
        case "answer":
            return [{"action": "answer", "text": values.get("content")}]
        case _:  # scroll, which Holo1.5 does without a place and a distance
            clicks, direction = values.get("scroll_size", 10), values["direction"]
            px_per_click = _PX_PER_CLICK if direction in ("up", "right") else -_PX_PER_CLICK
            distance = clicks * px_per_click if isinstance(clicks, int) else clicks
            action = "scroll" if direction in ("up", "down") else "hscroll"
            return [{"action": action, "pixels": distance, **(at if "x" in values else {})}]


def _failure(kind: Literal["json", "tool_name", "tool_arguments"], what: str) -> ParseFailure:
    message = f"Your answer could not be understood: {what}. Answer in the format of the system message."
    return ParseFailure(kind=kind, message=message)
