"""Reads conversations of the computer tools of OpenAI (Responses), Anthropic (Messages) and Google (Gemini).

Each is the list of a conversation's items, or the request that holds it, whose tools tell the size of the display and,
of OpenAI, the kind of device. The last words of the model end the task.
"""

import json
from collections.abc import Sequence

from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.foreign_actions import ForeignAction
from cua_rl.exchange.recorder import ForeignTrajectory, Recorder
from cua_rl.exchange.rows import Row, as_row, as_rows

_GEMINI_MAGNITUDE = 800
"""Of a scroll without one: the default of Google's own program, github.com/google-gemini/computer-use-preview."""
_OPENAI_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "refusal", "input_image"})
_ANTHROPIC_UNSEEN = frozenset({"redacted_thinking", "document", "search_result", "tool_reference"})
"""Parts that show nothing of the screen."""


def read_openai(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """Items of the Responses API; `environment` of the tool is the kind of device."""
    tool = _tool_with(value, "display_width")
    environment: str | None = tool.get("environment")
    if tool:
        recorder.display = (int(tool["display_width"]), int(tool["display_height"]))
    items = [*_items(value.get("items", value.get("input"))), *_items(value.get("output"))]
    for item in items:
        _read_openai_item(item, recorder, is_last=item is items[-1])
    kind: DeviceKind | None = None
    if environment is not None:
        kind = "browser" if environment == "browser" else "linux"
    return recorder.finish(f"openai/{value.get('id') or recorder.where}", kind=kind)


def _read_openai_item(item: Row, recorder: Recorder, *, is_last: bool) -> None:
    match item.get("type", "message"):
        case "message":
            text, shown = _openai_content(item.get("content") or ())
            _say(recorder, text, role=item["role"], is_last=is_last)
            for source in shown:
                recorder.see(source)
        case "reasoning":
            recorder.think("\n".join(str(part["text"]) for part in item.get("summary") or ()))
        case "computer_call":
            for action in item.get("actions") or [item["action"]]:
                given = {key: entry for key, entry in action.items() if key != "type"}
                recorder.act(ForeignAction(name=str(action["type"]), given=given), call_id=item.get("call_id"))
        case "function_call":
            given = as_row(json.loads(item["arguments"] or "{}"))
            recorder.act(ForeignAction(name=str(item["name"]), given=given), call_id=item.get("call_id"))
        case str(kind) if kind.endswith("_call"):
            recorder.act(ForeignAction(name=kind, given={}))
        case str(kind) if kind.endswith("_output"):
            recorder.leave()
            output: object = item.get("output") or ()
            is_screen = isinstance(output, dict)
            shown: list[object] = [item["output"]["image_url"]] if is_screen else _openai_content(output)[1]
            for source in shown:
                recorder.see(source, call_id=item.get("call_id"))
        case kind:
            raise _unknown("items", kind)


def _items(value: object) -> Sequence[Row]:
    """The items of a request or response, whose input may be one text."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else as_rows(value or ())


def _openai_content(content: object) -> tuple[str, list[object]]:
    if isinstance(content, str):
        return content, []
    parts = as_rows(content)
    for part in parts:
        if part.get("type") not in _OPENAI_PARTS:
            raise _unknown("parts", part.get("type"))
    return "\n".join(str(part["text"]) for part in parts if "text" in part), [
        part["image_url"] for part in parts if part.get("type") == "input_image"
    ]


def read_anthropic(value: Row, recorder: Recorder) -> ForeignTrajectory:
    messages = as_rows(value["messages"])
    tool = _tool_with(value, "display_width_px")
    if tool:
        recorder.display = (int(tool["display_width_px"]), int(tool["display_height_px"]))
    for message in messages:
        parts = _anthropic_parts(message)
        is_end = message is messages[-1] and all(part["type"] != "tool_use" for part in parts)
        for part in parts:
            match part["type"]:
                case "text" | "thinking":
                    text = str(part[part["type"]])
                    _say(recorder, text, role=message["role"], is_last=is_end and part is parts[-1])
                case "tool_use":
                    recorder.act(ForeignAction(name=str(part["name"]), given=part["input"]), call_id=part["id"])
                case "tool_result":
                    _see_anthropic(recorder, part)
                case "image":
                    recorder.see(part["source"].get("data") or part["source"].get("url"))
                case str(kind) if kind.endswith("_tool_use"):
                    recorder.act(ForeignAction(name=kind, given={}))
                case str(kind) if kind in _ANTHROPIC_UNSEEN or kind.endswith("_tool_result"):
                    pass
                case kind:
                    raise _unknown("parts", kind)
    return recorder.finish(f"anthropic/{value.get('id') or recorder.where}", kind=None)


def _anthropic_parts(message: Row) -> Sequence[Row]:
    if message["role"] not in ("user", "assistant", "system") or message.get("tool_calls"):
        raise ValueError("messages of Chat Completions, which are not read")
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else as_rows(content)


def _see_anthropic(recorder: Recorder, result: Row) -> None:
    content = result.get("content") or ()
    recorder.leave()
    for part in () if isinstance(content, str) else as_rows(content):
        if part["type"] == "image":
            recorder.see(part["source"].get("data") or part["source"].get("url"), call_id=result["tool_use_id"])
        elif part["type"] not in {"text", *_ANTHROPIC_UNSEEN}:
            raise _unknown("parts of results", part["type"])


def read_gemini(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """Contents of the Gemini API, in the names of its REST interface or of its Python library."""
    contents = as_rows(value["contents"])
    recorder.display = (1000, 1000)  # coordinates are thousandths
    for content in contents:
        parts = as_rows(content.get("parts") or ())
        is_end = content is contents[-1] and not any(_either(part, "function_call") for part in parts)
        for part in parts:
            call, response = _either(part, "function_call"), _either(part, "function_response")
            if call is not None:
                name, given = str(call["name"]), dict(as_row(call.get("args") or {}))
                if name in ("scroll", "scroll_at"):
                    given.setdefault("magnitude", _GEMINI_MAGNITUDE)
                recorder.act(ForeignAction(name=name, given=given))
            if response is not None:
                recorder.leave()
            for shown in [part] if response is None else as_rows(response.get("parts") or ()):
                image = _either(shown, "inline_data")
                if _either(shown, "file_data"):
                    raise ValueError("a picture outside the file (file_data)")
                if image is not None:
                    recorder.see(image["data"])
            if part.get("text"):
                is_last = is_end and part is parts[-1]
                _say(recorder, str(part["text"]), role=content.get("role"), is_last=is_last)
    return recorder.finish(f"gemini/{value.get('id') or recorder.where}", kind=None)


def _either(part: Row, name: str) -> Row | None:
    """A field by its name in Python or in JSON."""
    head, _, tail = name.partition("_")
    found = part.get(name) or part.get(head + tail.title())
    return None if found is None else as_row(found)


def _say(recorder: Recorder, text: str, *, role: object, is_last: bool) -> None:
    """Words of a conversation; the model's last ones end the task."""
    if role in ("system", "developer"):
        return  # our agent has its own system prompt
    if role == "user":
        recorder.tell(text)
        return
    recorder.think(text)
    if is_last and recorder.steps and recorder.screen is not None:
        recorder.act(ForeignAction(name="finish", given={}))


def _unknown(what: str, kind: object) -> ValueError:
    """What is ignored may contain the screen that the next action refers to."""
    return ValueError(f"{what} of type {kind!r}, which are not read")


def _tool_with(whole: Row, field: str) -> Row:
    """The tool that has a field, of the tools of a request."""
    nothing: Row = {}
    return next((tool for tool in as_rows(whole.get("tools") or ()) if field in tool), nothing)
