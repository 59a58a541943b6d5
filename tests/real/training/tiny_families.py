"""A random model of every family on disk, small enough for tests, and datums for it."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from cua_rl.types.rollout import Datum
from tests.real.training.tiny_qwen3_vl import (
    IMAGE_PAD,
    PREPROCESSOR,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    build_random_qwen3_vl,
    draw_screenshot,
    make_datum,
)

TOKEN_PX = {"qwen2_5_vl": 28, "qwen3_5": 32, "qwen3_5_moe": 32, "qwen3_vl": 32, "qwen3_vl_moe": 32}
"""The side of the square that is one token of an image."""
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
_VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_HYBRID = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_TOKENS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def build_random_qwen2_5_vl(
    folder: Path, *, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}, **settings: object
) -> Path:
    """Windows of two by two tokens in the first vision layer, full attention in the second; patch 14, merge 2."""
    widths = {**_TEXT, **text}
    half = cast("int", widths["hidden_size"]) // 4 // 2  # of a head
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * (half // 3), *[half // 3] * 2]}
    config = Qwen2_5_VLConfig(
        text_config={**widths, "rope_parameters": rope},
        vision_config={**_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], **vision},
        **{**_TOKENS, **settings},
    )
    _save(Qwen2_5_VLForConditionalGeneration, config, folder)
    size = {"min_pixels": 784, "max_pixels": 1048576}  # as published: not in a group of their own
    processor = {name: value for name, value in PREPROCESSOR.items() if name != "size"} | size | {"patch_size": 14}
    if not (folder / "preprocessor_config.json").exists():
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def build_random_qwen3_5(
    folder: Path, *, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}, **settings: object
) -> Path:
    """Two layers with linear attention, then one with softmax attention; heads of 16 that turn their first half."""
    config = Qwen3_5Config(
        text_config=_TEXT | _HYBRID | text,
        vision_config={**_VISION, "patch_size": 16, "num_position_embeddings": 256, **vision},
        **{**_TOKENS, **settings},
    )
    return _save_with_images(Qwen3_5ForConditionalGeneration, config, folder)


def build_random_qwen3_5_moe(
    folder: Path, *, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}, **settings: object
) -> Path:
    """The layers of `build_random_qwen3_5`, with two of eight experts a token and one that all tokens visit."""
    shared = {"shared_expert_intermediate_size": 32}
    config = Qwen3_5MoeConfig(
        text_config=_TEXT | _HYBRID | _EXPERTS | shared | text,
        vision_config={**_VISION, "patch_size": 16, "num_position_embeddings": 256, **vision},
        **{**_TOKENS, **settings},
    )
    return _save_with_images(Qwen3_5MoeForConditionalGeneration, config, folder)


def build_random_qwen3_vl_moe(
    folder: Path, *, text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}, **settings: object
) -> Path:
    """Two of eight experts a token; deepstack at both vision layers; files as published, with inputs before outputs."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    deepstack = {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    config = Qwen3VLMoeConfig(
        text_config=_TEXT | _EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "rope_parameters": rope} | text,
        vision_config=_VISION | deepstack | vision,
        **{**_TOKENS, **settings},
    )
    _save_with_images(Qwen3VLMoeForConditionalGeneration, config, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if ".experts." in name:
            weights[name] = tensor.transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": build_random_qwen2_5_vl,
    "qwen3_5": build_random_qwen3_5,
    "qwen3_5_moe": build_random_qwen3_5_moe,
    "qwen3_vl": build_random_qwen3_vl,
    "qwen3_vl_moe": build_random_qwen3_vl_moe,
}


def make_datums(family: str) -> list[Datum]:
    """Different lengths, sizes and numbers of images; one screenshot in two sequences; one sequence without images."""
    rng, side = random.Random(0), TOKEN_PX[family]
    small = [draw_screenshot(rng, width=3 * side, height=2 * side) for _ in range(2)]
    wide = draw_screenshot(rng, width=5 * side, height=2 * side)
    return [
        make_datum(rng, [small[0], wide], token_px=side),
        make_datum(rng, [small[0]], text=9, sampled=7, token_px=side),
        make_datum(rng, []),
        make_datum(rng, [wide, small[1], small[0]], text=3, sampled=4, token_px=side),
    ]


def _save_with_images(model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Path:
    _save(model_class, config, folder)
    if not (folder / "preprocessor_config.json").exists():
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def _save(model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # wide enough that images and positions matter to the answer
                inputs = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]  # experts have three
                torch.nn.init.normal_(parameter, std=inputs**-0.5)
        torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.15)
    model.save_pretrained(folder)
