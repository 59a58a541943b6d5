"""Families of models that can be trained: what this package must know about each beyond the files of a checkpoint.

Transformers and vLLM find the model's classes by `model_type`; image settings are read from the checkpoint. What else
differs shows in the modules themselves: norms of queries and keys, and visual features for the first decoder layers
(deepstack). docs/models.md says how to add a family.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LoraModule = Literal["language", "merger", "vision"]
_LAYERS = r"model\.language_model\.layers\.\d+\."
_ATTENTION = r"self_attn\.(q|k|v|o)_proj"
_DENSE = rf"{_LAYERS}({_ATTENTION}|mlp\.(gate|up|down)_proj)"
_VISION_ATTENTION = r"model\.visual\.blocks\.\d+\.attn\.(qkv|proj)"
_QWEN3_VISION: Mapping[LoraModule, str] = {
    "merger": r"model\.visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]",
    "vision": rf"{_VISION_ATTENTION}|model\.visual\.blocks\.\d+\.mlp\.linear_fc[12]",
}
# of the layers with linear attention; `_DENSE` has those with softmax attention
_LINEAR_ATTENTION = rf"{_LAYERS}linear_attn\.(in_proj_(qkv|z|b|a)|out_proj)"
_QWEN2_5_VISION: Mapping[LoraModule, str] = {
    "merger": r"model\.visual\.merger\.mlp\.[02]",
    "vision": rf"{_VISION_ATTENTION}|model\.visual\.blocks\.\d+\.mlp\.(gate|up|down)_proj",
}


_SERVED_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SERVED_LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with one architecture and one chat format."""

    renderer: str
    """The renderer of its chat format (`renderers/renderer.py`); a chat template marks Thinking models."""
    lora_targets: Mapping[LoraModule, str]
    """Regular expressions of the linear layers that get an adapter, by their names in Transformers."""
    served_modules: Sequence[str] = ()
    """The only layers for whose adapters the server makes room, by their last names; () are all."""
    full_training_problem: str | None = None
    """Why not all of its weights can be trained; None if they can."""
    cpu_dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision in which vLLM serves it on a CPU, unless it is set; bfloat16 is far slower without matrix units."""
    half_rounding: float = 0.1
    """Mean absolute difference of log-probabilities that half precision may explain, nats: three times what dense
    models have shown."""


FAMILIES: Mapping[str, Family] = {
    "qwen2_5_vl": Family(renderer="qwen2_5_vl", lora_targets={"language": _DENSE, **_QWEN2_5_VISION}),
    "qwen3_5": Family(
        renderer="qwen3_5",
        lora_targets={"language": rf"{_DENSE}|{_LINEAR_ATTENTION}", **_QWEN3_VISION},
        cpu_dtype="bfloat16",  # the only one that its linear attention knows there
    ),
    # as of qwen3_vl_moe; the expert that every token visits stays as it is, too
    "qwen3_5_moe": Family(
        renderer="qwen3_5",
        lora_targets={"language": rf"{_LAYERS}{_ATTENTION}|{_LINEAR_ATTENTION}", **_QWEN3_VISION},
        served_modules=(*_SERVED_ATTENTION, *_SERVED_LINEAR_ATTENTION),
        cpu_dtype="bfloat16",
        half_rounding=0.2,
    ),
    "qwen3_vl": Family(renderer="qwen3_vl", lora_targets={"language": _DENSE, **_QWEN3_VISION}),
    # attention only: router and experts stay as they are, so that sampler and trainer choose the same experts
    "qwen3_vl_moe": Family(
        renderer="qwen3_vl",
        lora_targets={"language": _LAYERS + _ATTENTION, **_QWEN3_VISION},
        # vLLM would make room for adapters of all experts: 9 GiB for four of Qwen3-VL-30B-A3B of rank 32
        served_modules=_SERVED_ATTENTION,
        full_training_problem="Transformers saves the experts in a layout that vLLM does not read",
        half_rounding=0.2,  # a token near the border between two experts may visit another one
    ),
}
"""By the `model_type` of the checkpoint's config.json."""


def find_family(model_path: Path) -> Family | None:
    """The family of a model folder; None if it is not in `FAMILIES`."""
    path = model_path / "config.json"
    kind = json.loads(path.read_text(encoding="utf-8")).get("model_type") if path.is_file() else None
    return FAMILIES.get(str(kind))
