"""Renderers: conversations to tokens, and sampled text to reasoning, text and tool calls, per family of models."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cua_rl.renderers.chat_format import is_thinking_model
from cua_rl.renderers.families import FAMILIES
from cua_rl.renderers.qwen3_vl import (
    Qwen3VLRenderer,
    load_qwen2_5_vl,
    load_qwen3,
    load_qwen3_5,
    load_qwen3_vl,
    load_qwen3_vl_thinking,
)
from cua_rl.types.errors import ConfigError

Renderer = Qwen3VLRenderer
"""One class renders every supported family; loaders differ in its chat format and image settings."""

_LOADERS: Mapping[str, Callable[[Path], Renderer]] = {
    "qwen2_5_vl": load_qwen2_5_vl,
    "qwen3": load_qwen3,
    "qwen3_5": load_qwen3_5,
    "qwen3_vl": load_qwen3_vl,
    "qwen3_vl_thinking": load_qwen3_vl_thinking,
}
_NAME_OF_MODEL_TYPE = {
    **{model_type: family.renderer for model_type, family in FAMILIES.items()},
    # text only: they can be rendered, but see no screenshots
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
}


def make_renderer(model_path: Path, renderer_name: str | None = None) -> Renderer:
    """The renderer for a model folder: by name, or else by the `model_type` in its `config.json` and its chat template;
    raises `ConfigError` if there is no such renderer, none for this type of model, or files are missing in the folder.
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
