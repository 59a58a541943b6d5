"""What the recorded agents see and may do; plain Python, because their environments have none of our packages."""

import json
from pathlib import Path
from typing import Any

_WORLD: Any = json.loads(Path(__file__).with_name("world.json").read_text())

INSTRUCTIONS: str = _WORLD["instructions"]
TASK: str = _WORLD["task"]
FOLLOW_UPS: list[str] = _WORLD["follow_ups"]
"""What the user says whenever the model makes no call; then the conversation ends."""
SCREEN: str = _WORLD["screen"]
"""A screenshot as a `data:` URL."""
FUNCTIONS: list[dict[str, Any]] = _WORLD["functions"]


def chat_question() -> list[Any]:
    """The first messages of a Chat conversation."""
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": [_text(TASK), _image()]}]


def chat_tools() -> list[Any]:
    """The tools of a Chat request."""
    return [{"type": "function", "function": function} for function in FUNCTIONS]


def chat_result(name: str) -> Any:
    """The result of a tool in Chat's form."""
    return [_text("Here."), _image()] if name == "screenshot" else "ok"


def responses_question() -> list[Any]:
    """The first items of a Responses conversation."""
    return [{"role": "user", "content": [{"type": "input_text", "text": TASK}, _input_image()]}]


def responses_tools() -> list[Any]:
    """The tools of a Responses request."""
    return [{"type": "function", "strict": False, **function} for function in FUNCTIONS]


def responses_result(name: str) -> Any:
    """The result of a tool in the form of Responses."""
    return [{"type": "input_text", "text": "Here."}, _input_image()] if name == "screenshot" else "ok"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": SCREEN}}


def _input_image() -> dict[str, Any]:
    return {"type": "input_image", "image_url": SCREEN, "detail": "auto"}
