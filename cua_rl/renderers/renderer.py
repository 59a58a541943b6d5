"""Renderers: conversations to tokens, and sampled text to reasoning, text and tool calls, per family of models."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cua_rl.conversation import Item, ParsedAnswer, Tool
from cua_rl.errors import ConfigError
from cua_rl.model_input import ModelInput
from cua_rl.renderers.chat_format import is_thinking_model
from cua_rl.renderers.qwen3_vl import load_qwen3, load_qwen3_vl, load_qwen3_vl_thinking
from cua_rl.renderers.replay import ReplayedItem


class Renderer(Protocol):
    """Converts conversation items to model input and parses answers; needs neither torch nor a server."""

    @property
    def name(self) -> str:
        """Its name for `make_renderer`."""
        ...

    @property
    def supports_images(self) -> bool:
        """Whether the model sees images."""
        ...

    @property
    def image_token_id(self) -> int:
        """The placeholder token of images, repeated `expected_tokens` times; -1 without images."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, the normal one first."""
        ...

    def to_send(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[ReplayedItem, ...], tuple[Tool, ...]]:
        """Conversation and tools to send to the model server, so that its prompt equals that of `render`."""
        ...

    def render(self, items: Sequence[Item], tools: Sequence[Tool] = ()) -> ModelInput:
        """The prompt for the next answer."""
        ...

    def render_supervised(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[ModelInput, tuple[bool, ...]]:
        """A conversation that ends with an answer, and True for every token of an answer."""
        ...

    def parse(self, text: str) -> ParsedAnswer:
        """Split an answer into reasoning, text and tool calls; never raises."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        ...


_LOADERS: Mapping[str, Callable[[Path], Renderer]] = {
    "qwen3": load_qwen3,
    "qwen3_vl": load_qwen3_vl,
    "qwen3_vl_thinking": load_qwen3_vl_thinking,
}
_NAME_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}


def make_renderer(model_path: Path, renderer_name: str | None = None) -> Renderer:
    """The renderer for a model folder: by name, or else by the `model_type` in its `config.json` and its chat template.

    Raises:
        ConfigError: no such renderer, none for this type of model, or files missing in the folder.
    """
    name = renderer_name
    if not name:
        path = model_path / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"expected a model folder with {str(path)!r}, got no such file; give the path of a downloaded model"
            )
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        if model_type not in _NAME_OF_MODEL_TYPE:
            raise ConfigError(
                f"expected a model_type among {sorted(_NAME_OF_MODEL_TYPE)} in {str(path)!r}, got {model_type!r}; "
                f"use such a model, or set renderer_name to one of {sorted(_LOADERS)}"
            )
        name = _NAME_OF_MODEL_TYPE[model_type]
        if name == "qwen3_vl" and is_thinking_model(model_path):
            name = "qwen3_vl_thinking"
    if name not in _LOADERS:
        raise ConfigError(f"expected a renderer among {sorted(_LOADERS)}, got {name!r}; correct renderer_name")
    return _LOADERS[name](model_path)
