"""Values of the system as columns, and back: actions, prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import cast, get_args

from cua_rl.actions import Action, Button, PressButton, PressKey
from cua_rl.conversation import EncodedImage
from cua_rl.types import Chunk, EncodedTextChunk, ImageChunk, ModelInput

_ACTION_CLASSES: dict[str, type[Action]] = {kind.__name__: kind for kind in get_args(Action)}


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
    later = cast("Sequence[Mapping[str, object]]", (encoded or {}).get("then", ()))
    return tuple(decode_action(action) for action in later)


def decode_action(encoded: Mapping[str, object]) -> Action:
    """The inverse of `encode_action`."""
    values = {name: value for name, value in encoded.items() if name not in ("type", "then")}
    kind = _ACTION_CLASSES[str(encoded["type"])]
    if kind is PressKey:
        return PressKey(keys=tuple(cast("Sequence[str]", values["keys"])))
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
    token_ids: Sequence[int], chunks: Sequence[Mapping[str, object]], images: Mapping[str, EncodedImage]
) -> ModelInput:
    """Split flat token ids into text and images as `encode_prompt_chunks` noted it; `images` are by sha256."""
    decoded: list[Chunk] = []
    position = 0
    for chunk in chunks:
        if "image" in chunk:
            image = images[str(chunk["image"])]
            decoded.append(ImageChunk(image=image, expected_tokens=cast("int", chunk["tokens"])))
        else:
            length = cast("int", chunk["text"])
            decoded.append(EncodedTextChunk(tokens=tuple(token_ids[position : position + length])))
        position += decoded[-1].length
    return ModelInput(chunks=tuple(decoded))
