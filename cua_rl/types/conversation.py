"""A conversation as typed items, shaped like the OpenAI Responses API, for agent, gateway, renderers and database."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from typing import Literal

from pybase64 import b64encode

Role = Literal["system", "developer", "user", "assistant"]
ImageFormat = Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A piece of text in a message or tool result."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """A screenshot as encoded bytes: one object from the device through prompt and training to the database.

    `sha256` (hex) of the bytes is its identity. The size is that of the image as it is shown, with its EXIF
    orientation applied. `state` is the device's name for the state that it shows, if it has one; a turn keeps it, and
    messages between processes leave it out.
    """

    data: bytes
    format: ImageFormat
    width_px: int
    height_px: int
    state: str = field(default="", compare=False, repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", sha256(self.data).hexdigest())

    def data_url(self) -> str:
        """The image as a `data:` URL, encoded again at every call."""
        return f"data:image/{self.format};base64,{b64encode(self.data).decode()}"

    def sha256_below(self, top: float) -> str:
        """SHA-256 of the pixels below the share `top` of the height; of the bytes, if it is 0 or they are not here."""
        if not top or not self.data:
            return self.sha256
        from PIL import Image

        with Image.open(BytesIO(self.data)) as image:
            below = image.crop((0, round(top * image.height), *image.size)).convert("RGBA")
            return sha256(repr(image.size).encode() + below.tobytes()).hexdigest()


Part = TextPart | EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of any role; an assistant message holds plain text only."""

    role: Role
    content: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """What the model thought before it answered (the inside of its think block)."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call the model made; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back for a tool call."""

    call_id: str
    content: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One earlier answer of the model, byte for byte as it was sampled, without its end-of-turn token.

    The gateway puts it in place of the reasoning, message and tool-call items that were parsed from it, so that the
    next prompt extends the earlier tokens.
    """

    text: str


Item = Message | Reasoning | ToolCall | ToolResult | SampledAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseFailure:
    """Why an answer of the model could not be understood; `message` is fit to be shown to the model."""

    kind: Literal["json", "tool_call_form", "unclosed", "tool_name", "tool_arguments"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer taken apart; with a `failure`, what could be read is still there."""

    reasoning: str | None
    text: str
    tool_calls: tuple[ToolCall, ...]
    failure: ParseFailure | None = None
