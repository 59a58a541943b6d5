"""Generated conversations, as our items and as the messages that Transformers' chat templates take."""

import json
import random
from dataclasses import dataclass, field
from io import BytesIO

from PIL import Image

from cua_rl.types.conversation import (
    Item,
    Message,
    Part,
    Reasoning,
    SampledAnswer,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from tests.builders import stored_image

_WORDS = [
    "open", "Settings", "  ", "\n", "\n\n", "Wi-Fi", "naïve", "e\u0301tude", "日本語", "👩\u200d💻", "مرحبا", "<b>",
    "&amp;", '"quoted"', "\\n", "it's", "12345", "3.14", "\t", "{}", "<think>", "</think>", "<tool_call>",
    "</tool_response>", "C:\\dir", "ﬁ", "\u00a0", "…",
]  # fmt: skip
_SIZES = [(20, 20), (64, 64), (33, 97), (120, 48), (192, 320), (301, 77), (47, 250), (16, 16)]


@dataclass
class Generated:
    """One conversation twice, with the images in the order in which they are shown."""

    items: list[Item] = field(default_factory=list)
    messages: list[dict[str, object]] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)

    @property
    def template_tools(self) -> list[dict[str, object]] | None:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self.tools
        ] or None


def generate_conversation(
    seed: int, *, with_images: bool = True, with_thinking: bool = True, ends_with_answer: bool = False
) -> Generated:
    """A conversation of a few turns; the same for the same seed."""
    rng = random.Random(seed)
    made = Generated()
    if rng.random() < 0.6:
        made.tools = [_tool(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.6:
        _add_message(made, "system", [TextPart(text=_text(rng)) for _ in range(rng.randint(1, 2))])
    for _ in range(rng.randint(1, 4)):
        _add_message(made, "user", _parts(rng, made, with_images))
        _add_answer(made, rng, with_images, with_thinking)
    if ends_with_answer:
        _add_message(made, "user", _parts(rng, made, with_images))
        text = "ok " + _text(rng)
        made.items.append(Message(role="assistant", content=(TextPart(text=text),)))
        made.messages.append({"role": "assistant", "content": text})
    elif rng.random() < 0.5:
        _add_message(made, "user", _parts(rng, made, with_images))
    return made


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A small picture that depends on the seed."""
    return Image.new("RGB", (width, height), (seed * 37 % 256, seed * 101 % 256, seed % 256))


def encode_image(image: Image.Image, image_format: str = "png") -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format)
    return buffer.getvalue()


def _add_message(made: Generated, role: str, parts: list[Part]) -> None:
    made.items.append(Message(role=role, content=tuple(parts)))
    made.messages.append({"role": role, "content": [_template_part(part) for part in parts]})


def _add_answer(made: Generated, rng: random.Random, with_images: bool, with_thinking: bool) -> None:
    text = _text(rng) if rng.random() < 0.7 else ""
    if rng.random() < 0.3:
        made.items.append(SampledAnswer(text=text))
        made.messages.append({"role": "assistant", "content": text})
        return
    text = text or "on it"
    thought = f"I think {_text(rng)}" if with_thinking and rng.random() < 0.5 else None
    calls = [_tool_call(rng, f"call_{len(made.items)}_{index}") for index in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    only_calls = bool(calls) and thought is None and rng.random() < 0.5
    if thought is not None:
        made.items.append(Reasoning(text=thought))
    if not only_calls:
        made.items.append(Message(role="assistant", content=(TextPart(text=text),)))
    made.items += calls
    head = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    made.messages.append(
        {
            "role": "assistant",
            "content": "" if only_calls else head + text,
            "tool_calls": [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in calls
            ],
        }
    )
    for call in calls:
        parts = _parts(rng, made, with_images)
        made.items.append(ToolResult(call_id=call.call_id, content=tuple(parts)))
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        is_text = len(texts) == len(parts)
        content = "\n".join(texts) if is_text else [_template_part(part) for part in parts]
        made.messages.append({"role": "tool", "content": content})


def _parts(rng: random.Random, made: Generated, with_images: bool) -> list[Part]:
    parts: list[Part] = []
    for _ in range(rng.randint(1, 4)):
        if not with_images or rng.random() < 0.6:
            parts.append(TextPart(text=_text(rng)))
            continue
        image = make_image(*rng.choice(_SIZES), seed=rng.randint(0, 10_000))
        image_format = rng.choice(("png", "jpeg"))
        made.images.append(image)
        parts.append(stored_image(encode_image(image, image_format)))
    return parts


def _template_part(part: Part) -> dict[str, object]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


def _text(rng: random.Random) -> str:
    return rng.choice(("", " ")).join(rng.choice(_WORDS) for _ in range(rng.randint(1, 12)))


def _tool(rng: random.Random) -> Tool:
    properties = {name: {"type": "integer", "description": _text(rng)} for name in rng.sample("xyzab", 2)}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Tool(name=rng.choice(("click", "type_text")), description=_text(rng), parameters=parameters)


def _tool_call(rng: random.Random, call_id: str) -> ToolCall:
    arguments = {"x": rng.randint(0, 1000), "text": _text(rng), "nested": {"b": [1, 2.5, None, True], "a": {}}}
    separators = rng.choice(((",", ":"), (", ", ": ")))
    return ToolCall(call_id=call_id, name="click", arguments=json.dumps(arguments, separators=separators))
