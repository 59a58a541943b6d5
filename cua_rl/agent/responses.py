"""Responses-API input items as JSON: the few forms in which the agent speaks to the model."""

from collections.abc import Mapping

from cua_rl.conversation import EncodedImage, Tool

Json = Mapping[str, object]


def system_item(prompt: str) -> Json:
    """The system prompt."""
    return {"type": "message", "role": "system", "content": [_text(prompt)]}


def user_item(text: str, screenshot: EncodedImage | None = None) -> Json:
    """A message to the model, with a screenshot below the text if there is one."""
    return {"type": "message", "role": "user", "content": _content(text, screenshot)}


def tool_result_item(call_id: str, text: str, screenshot: EncodedImage | None = None) -> Json:
    """What came back for a tool call."""
    return {"type": "function_call_output", "call_id": call_id, "output": _content(text, screenshot)}


def function_tool(tool: Tool) -> Json:
    """A tool the model may call."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": False,
    }


def _content(text: str, screenshot: EncodedImage | None) -> list[Json]:
    return [part for part in (_text(text) if text else None, _image(screenshot) if screenshot else None) if part]


def _text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def _image(screenshot: EncodedImage) -> Json:
    return {"type": "input_image", "image_url": screenshot.data_url(), "detail": "auto"}
