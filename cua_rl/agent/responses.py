"""Responses-API input items as JSON, in the few forms that agents send to the model."""

from cua_rl.conversation import Tool
from cua_rl.types import Json


def system_item(prompt: str) -> Json:
    """The system prompt."""
    return {"type": "message", "role": "system", "content": _content(prompt, None)}


def user_item(text: str, image_url: str | None = None) -> Json:
    """A message to the model, with a screenshot below the text if there is one."""
    return {"type": "message", "role": "user", "content": _content(text, image_url)}


def tool_result_item(call_id: str, text: str, image_url: str | None = None) -> Json:
    """What came back for a tool call."""
    return {"type": "function_call_output", "call_id": call_id, "output": _content(text, image_url)}


def function_tool(tool: Tool) -> Json:
    """A tool the model may call."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": False,
    }


def _content(text: str, image_url: str | None) -> list[Json]:
    texts: list[Json] = [{"type": "input_text", "text": text}] if text else []
    images: list[Json] = [{"type": "input_image", "image_url": image_url, "detail": "auto"}] if image_url else []
    return texts + images
