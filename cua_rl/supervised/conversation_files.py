"""Conversations from a file: one JSON object per line, in the format of Chat Completions or of the Responses API.

    {"messages": [...], "tools": [...]}                          Chat Completions
    {"input": [...], "instructions": "...", "tools": [...]}      Responses

Each ends with an answer of the assistant. Images are `data:` URLs, or paths relative to the file's folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pybase64 import b64encode

from cua_rl.renderers.openai_fields import FieldPath
from cua_rl.renderers.openai_items import Conversation, conversation_from_chat, conversation_from_responses
from cua_rl.renderers.renderer import Renderer
from cua_rl.renderers.request_error import RequestError
from cua_rl.supervised.demonstrations import Demonstration, build_supervised_datum
from cua_rl.types.errors import ConfigError, boundary
from cua_rl.types.json_values import is_array, is_object, mapping, sequence
from cua_rl.types.rollout import Datum, ImageChunk

_KNOWN: Mapping[str, frozenset[str]] = {
    "messages": frozenset({"messages", "tools"}),
    "input": frozenset({"input", "instructions", "tools"}),
}
_NO_EFFECT = frozenset({"id", "metadata", "model", "source", "tool_choice", "parallel_tool_calls"})
_MESSAGE = frozenset({"role", "content", "name", "weight", "tool_calls", "tool_call_id", "reasoning_content"}) | {
    *("reasoning", "id", "annotations"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLine:
    """Position and content of a conversation in the file."""

    number: int
    """1-based, as in editors."""
    offset_bytes: int
    content_sha256: str
    """Hash of tokens and images: lines with the same hash are the same conversation."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFile:
    """A file whose lines have all been read and rendered once; training reads them again."""

    path: Path
    lines: tuple[ConversationLine, ...]
    renderer: Renderer

    def load(self, index: int) -> Datum:
        """The training sequence of the conversation with this 0-based index."""
        line = self.lines[index]
        with self.path.open("rb") as file:
            file.seek(line.offset_bytes)
            return build_line_datum(self.path, line.number, file.readline(), self.renderer)


def open_conversation_file(path: Path, renderer: Renderer, *, max_tokens: int) -> ConversationFile:
    """Check every line of the file, which is slow for long files; blank lines are ignored.

    Raises:
        ConfigError: the file does not exist, is empty, or has a line that cannot be trained on; the message names it.
    """
    lines: list[ConversationLine] = []
    with boundary(ConfigError, f"data: expected a file of conversations at {str(path)!r}"), path.open("rb") as file:
        offset_bytes = 0
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                datum = build_line_datum(path, number, raw, renderer)
                num_tokens, chunks = datum.model_input.length, datum.model_input.chunks
                if num_tokens > max_tokens:
                    raise ConfigError(
                        f"{path}:{number}: expected at most {max_tokens} tokens, got {num_tokens}; shorten the "
                        "conversation, or raise max_model_len if the model can hold more"
                    )
                content = [one.image.sha256 if isinstance(one, ImageChunk) else one.tokens for one in chunks]
                lines.append(
                    ConversationLine(
                        number=number,
                        offset_bytes=offset_bytes,
                        content_sha256=sha256(repr((content, datum.loss_mask)).encode()).hexdigest(),
                        num_tokens=num_tokens,
                    )
                )
            offset_bytes += len(raw)
    if not lines:
        raise ConfigError(f"data: expected conversations, one a line, got {str(path)!r} without any; fill the file")
    return ConversationFile(path=path, lines=tuple(lines), renderer=renderer)


def build_line_datum(path: Path, number: int, raw: bytes, renderer: Renderer) -> Datum:
    """The training sequence of one line; raises `ConfigError` that names file and line."""
    try:
        conversation = _parse_line(raw, path.parent)
        demonstration = Demonstration(items=conversation.items, tools=conversation.tools)
        return build_supervised_datum(renderer, demonstration, name=f"{path.name}:{number}")
    except (RequestError, ConfigError) as error:
        raise ConfigError(f"{path}:{number}: {error}") from None


def _parse_line(raw: bytes, folder: Path) -> Conversation:
    try:
        line: object = json.loads(raw)
    except ValueError as error:
        raise RequestError(
            expected="a JSON object", got=f"a line that is not JSON ({error})", do="correct it"
        ) from None
    if not is_object(line) or ("messages" in line) == ("input" in line):
        keys = sorted(line) if is_object(line) else line
        raise FieldPath("line").error("an object with either messages or input", keys, "write one of the two")
    fields = mapping(_with_images(line, folder))
    messages = fields.get("messages")
    known = _KNOWN["input" if messages is None else "messages"]
    _require_known(fields, known | _NO_EFFECT, FieldPath("line"))
    for index, message in enumerate(sequence(messages)):
        given = mapping(message)
        _require_known(given, _MESSAGE, FieldPath(f"messages[{index}]"))
        weight = given.get("weight", 1)
        if weight != 1:
            raise (FieldPath(f"messages[{index}]") / "weight").error(
                "1, because all answers of a conversation are trained on", weight, "end the conversation earlier"
            )
    return conversation_from_chat(fields) if "messages" in fields else conversation_from_responses(fields)


def _require_known(fields: Mapping[str, object], known: frozenset[str], at: FieldPath) -> None:
    """Ignoring a field, such as a misspelt one, would teach another conversation."""
    if unknown := sorted(key for key, value in fields.items() if key not in known and value is not None):
        raise at.error(f"only fields that are read ({', '.join(sorted(known))})", unknown, "remove or rename them")


def _with_images(value: object, folder: Path) -> object:
    """The same JSON with each image path replaced by the image itself."""
    if is_array(value):
        return [_with_images(entry, folder) for entry in value]
    if not is_object(value):
        return value
    fields = {key: _with_images(entry, folder) for key, entry in value.items()}
    if fields.get("type") in ("image_url", "input_image"):
        url = fields.get("image_url")
        nested = url.get("url") if is_object(url) else url
        if isinstance(nested, str) and "://" not in nested and not nested.startswith("data:"):
            path = folder / nested
            try:
                data = path.read_bytes()
            except OSError as error:
                raise RequestError(
                    expected="an image file",
                    got=f"{str(path)!r} ({error.strerror or type(error).__name__})",
                    do="give its path relative to the file's folder",
                ) from None
            # readers detect the format from the bytes
            fields["image_url"] = f"data:image/png;base64,{b64encode(data).decode()}"
    return fields
