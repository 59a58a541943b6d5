"""Action formats of model families (`agent.action_format`): how prompts describe actions, and how answers are parsed.

A format opens a conversation, has the `tools` of its requests, parses answers, and says what the model reads next. Here
are those whose answers are calls of a tool; `ui_tars.py` and `holo.py` have others.

The families' formats are facts of their publishers: Qwen2.5-VL's and Qwen3-VL's tools of github.com/QwenLM/Qwen3-VL
(`cookbooks/utils/agent_function_call.py`), GUI-Owl-1.5's of github.com/X-PLUG/MobileAgent (`Mobile-Agent-v3.5`).
"""

from dataclasses import dataclass, replace

from cua_rl.agent.element_tools import COMPUTER_ACT, MOBILE_ACT
from cua_rl.agent.history import system_item, tool_result_item, user_item
from cua_rl.agent.tools import (
    COMPUTER_USE,
    MAX_COORDINATE,
    MOBILE_USE,
    RELATIVE,
    action_names,
    function_tool,
    load_system_prompt,
    parse_action,
)
from cua_rl.environments.device import DeviceKind
from cua_rl.renderers.images import ImageSettings, smart_resize
from cua_rl.types.actions import Action, Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure, Tool, ToolCall
from cua_rl.types.json_values import Json, mapping, sequence

Parsed = tuple[Action, ...] | Finish | ParseFailure
"""The actions of an answer, to be done one after the other; the end of the rollout; or why there is neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenAnswer:
    """An answer of the model, and the screen that it refers to."""

    response: Json
    turn: int
    """Counted from 1."""
    kind: DeviceKind
    seen: EncodedImage
    cursor: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """All text that the model wrote outside of reasoning and calls."""
        messages = [item for item in self.items if item["type"] == "message"]
        parts = [mapping(part) for message in messages for part in sequence(message["content"])]
        return "".join(str(part["text"]) for part in parts if part["type"] == "output_text")

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(call_id=str(item["call_id"]), name=str(item["name"]), arguments=str(item["arguments"]))
            for item in self.items
            if item["type"] == "function_call"
        ]

    @property
    def items(self) -> list[Json]:
        return [mapping(item) for item in sequence(self.response["output"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """Answers with calls of one tool; with the default ones, Qwen3-VL's."""

    mobile: Tool = MOBILE_USE
    computer: Tool = COMPUTER_USE
    more: str = ""
    """What the system prompt asks for beside a call."""
    pixels_of: ImageSettings | None = None
    """Coordinates are pixels of the screenshot as resized with these settings; None: from 0 to 1000."""

    def tool(self, kind: DeviceKind) -> Tool:
        """The tool that operates this kind of device."""
        return self.mobile if kind == "android" else self.computer

    def opening(self, kind: DeviceKind, instruction: str, image_url: str) -> list[Json]:
        """System prompt, then the task with the screenshot."""
        prompt = load_system_prompt(kind, of_elements=self.mobile is MOBILE_ACT)
        return [system_item(prompt + self.more), user_item(instruction, image_url)]

    def tools(self, kind: DeviceKind, seen: EncodedImage) -> list[Json]:
        """The tool as a function; with pixels, its description has the size of the screen."""
        tool, (width, height) = self.tool(kind), reach(seen, self.pixels_of)
        if self.pixels_of is not None:
            absolute = (
                f"Coordinates are [x, y] in pixels, origin top left. The screen's resolution is {width}x{height}."
            )
            tool = replace(tool, description=tool.description.replace(RELATIVE, absolute))
        return [function_tool(tool)]

    def parse(self, answer: ScreenAnswer) -> Parsed:
        """The first call."""
        tool, seen = self.tool(answer.kind), answer.seen
        if not answer.calls:
            is_cut_off = answer.response["status"] == "incomplete"
            problem = "No tool call could be read from your answer."
            problem = "Your answer was cut off: it was too long." if is_cut_off else problem
            message = f"{problem} Answer with one call of {tool.name}, in the form that its definition asks for."
            return ParseFailure(kind="tool_call_form", message=message)
        action = parse_action(
            answer.calls[0],
            width_px=seen.width_px,
            height_px=seen.height_px,
            cursor=answer.cursor,
            offered=tool,
            scale=reach(seen, self.pixels_of),
        )
        return action if isinstance(action, Finish | ParseFailure) else (action,)

    def reply(self, answer: ScreenAnswer, error: str, image_url: str | None) -> list[Json]:
        """The result of the first call."""
        if not answer.calls:
            return [user_item(error, image_url)]
        first, *others = answer.calls
        ignored = [tool_result_item(other.call_id, "Ignored: one call per answer.") for other in others]
        return [tool_result_item(first.call_id, error, image_url), *ignored]


def reach(seen: EncodedImage, pixels_of: ImageSettings | None) -> tuple[int, int]:
    """Where coordinates end, at the right and at the bottom: 1000, or the sides of the resized screenshot."""
    if pixels_of is None:
        return MAX_COORDINATE, MAX_COORDINATE
    return smart_resize(seen.width_px, seen.height_px, pixels_of)


def extended(tool: Tool, *names: str, **described: str) -> Tool:
    """The tool with further actions, and arguments that are new or described anew."""
    properties = mapping(tool.parameters["properties"])
    changed = {name: {**mapping(properties.get(name)), "description": text} for name, text in described.items()}
    changed["action"] = {**mapping(properties["action"]), "enum": [*action_names(tool), *names]}
    return replace(tool, parameters={**tool.parameters, "properties": {**properties, **changed}})


_PHONE = extended(MOBILE_USE, "key", "open", text="what to type or answer, the name of a key, or of an app to open")
BY_ELEMENTS = ToolCalls(mobile=MOBILE_ACT, computer=COMPUTER_ACT)
"""For models that describe elements, which a grounder finds."""
GUI_OWL = ToolCalls(
    mobile=_PHONE,
    computer=extended(COMPUTER_USE, "hscroll", pixels="how far to scroll, positive is up, or to the right"),
    more=" Before the call, write one line that begins with Action: and says what you do.",
)


def qwen2_5_vl(image_settings: ImageSettings) -> ToolCalls:
    """Qwen2.5-VL's tools, and those of GUI-Owl on phones, which was trained from it."""
    return ToolCalls(mobile=_PHONE, pixels_of=image_settings)
