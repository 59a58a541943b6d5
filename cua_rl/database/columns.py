"""Values as columns, and back: column types that hold every string and float, actions and prompts as JSON.

Postgres rejects NUL, lone surrogates, and NaN in JSON. A model can sample any of them (`json.loads` of its answer, a
byte-level token), so they are escaped on the way in and restored on the way out. Ordinary text is stored as it is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import Any, get_args

from sqlalchemy import Dialect, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import TypeDecorator

from cua_rl.types.actions import Action, Button, PressButton, PressKey
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import is_array, is_object, mapping, sequence
from cua_rl.types.rollout import Chunk, EncodedTextChunk, ImageChunk, ModelInput

_ESCAPE = "\x1a"
_UNSTORABLE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile(_ESCAPE + "([0-9a-f]+);")
_NON_FINITE_KEY = _ESCAPE + "float"
_ACTION_CLASSES: dict[str, type[Action]] = {kind.__name__: kind for kind in get_args(Action)}


def escape_text(text: str) -> str:
    """Replace what Postgres cannot store by an escape; the inverse is `unescape_text`."""
    return _UNSTORABLE.sub(lambda match: f"{_ESCAPE}{ord(match.group()):x};", text)


def unescape_text(text: str) -> str:
    """Restore what `escape_text` replaced."""
    if _ESCAPE not in text:
        return text
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), text)


def escape_json(value: object) -> object:
    """Make a JSON value storable: strings escaped, non-finite floats as objects, tuples as lists."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, float) and not isfinite(value):
        return {_NON_FINITE_KEY: repr(value)}
    if is_object(value):
        return {escape_text(key): escape_json(item) for key, item in value.items()}
    return [escape_json(item) for item in value] if is_array(value) else value


def unescape_json(value: object) -> object:
    """Restore what `escape_json` replaced."""
    if isinstance(value, str):
        return unescape_text(value)
    if is_object(value):
        if _NON_FINITE_KEY in value:
            return float(str(value[_NON_FINITE_KEY]))
        return {unescape_text(key): unescape_json(item) for key, item in value.items()}
    return [unescape_json(item) for item in value] if is_array(value) else value


class AnyText(TypeDecorator[str]):
    """TEXT for any Python string."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else unescape_text(value)


class AnyJson(TypeDecorator[object]):
    """JSONB for any JSON value, with any string and any float in it; None is SQL NULL."""

    impl = JSONB(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: object, dialect: Dialect) -> object:
        return escape_json(value)

    def process_result_value(self, value: object, dialect: Dialect) -> object:
        return unescape_json(value)


class NumberArray(ARRAY[Any]):
    """An array of integers or floats, sent as one text: the driver's own way is slow for long prompts."""

    cache_ok = True
    render_bind_cast = True

    def adapt(self, cls: Any, **kw: Any) -> Any:
        """Its like: a dialect would take its own array in its place."""
        return super().adapt(NumberArray, **kw)

    def bind_processor(  # pyright: ignore[reportIncompatibleMethodOverride] - SQLAlchemy's type for it is private
        self, dialect: Dialect
    ) -> Callable[[Any], Any]:
        """`repr` of a float is exact, and Postgres reads it so."""

        def process(value: Sequence[float] | None) -> str | None:
            return None if value is None else f"{{{str(list(value))[1:-1]}}}"

        return process


def encode_action(action: Action) -> dict[str, object]:
    """`Click(x=3, y=4)` as {"type": "Click", "x": 3, "y": 4}."""
    encoded: dict[str, object] = {"type": type(action).__name__}
    return encoded | {field.name: getattr(action, field.name) for field in fields(action)}


def encode_actions(action: Action | None, more_actions: Sequence[Action] = ()) -> dict[str, object] | None:
    """An action, with those that followed it on the same answer under "then"; None if there is none."""
    if action is None:
        return None
    then = {"then": [encode_action(later) for later in more_actions]} if more_actions else {}
    return encode_action(action) | then


def decode_more_actions(encoded: Mapping[str, object] | None) -> tuple[Action, ...]:
    """The actions under "then"."""
    return tuple(decode_action(mapping(action)) for action in sequence((encoded or {}).get("then")))


def decode_action(encoded: Mapping[str, object]) -> Action:
    """The inverse of `encode_action`."""
    values = {name: value for name, value in encoded.items() if name not in ("type", "then")}
    kind = _ACTION_CLASSES[str(encoded["type"])]
    if kind is PressKey:
        return PressKey(keys=tuple(map(str, sequence(values["keys"]))))
    if kind is PressButton:
        return PressButton(button=Button(str(values["button"])))
    return kind(**values)  # pyright: ignore[reportArgumentType] - the values that encode_action took from it


def encode_prompt_chunks(prompt: ModelInput) -> list[dict[str, object]]:
    """What splits the flat token ids into chunks again: kinds, lengths and image hashes."""
    return [
        {"image": chunk.image.sha256, "tokens": chunk.expected_tokens}
        if isinstance(chunk, ImageChunk)
        else {"text": chunk.length}
        for chunk in prompt.chunks
    ]


def decode_prompt(
    token_ids: Sequence[int], chunks: Sequence[Mapping[str, Any]], images: Mapping[str, EncodedImage]
) -> ModelInput:
    """Split flat token ids into text and images as `encode_prompt_chunks` noted it; `images` are by sha256."""
    decoded: list[Chunk] = []
    position = 0
    for chunk in chunks:
        if "image" in chunk:
            image = images[str(chunk["image"])]
            decoded.append(ImageChunk(image=image, expected_tokens=chunk["tokens"]))
        else:
            length: int = chunk["text"]
            decoded.append(EncodedTextChunk(tokens=tuple(token_ids[position : position + length])))
        position += decoded[-1].length
    return ModelInput(chunks=tuple(decoded))
