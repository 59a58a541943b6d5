# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The tiny model before training, as a model folder: `python -m scripts.tiny_models.untrained_model FOLDER SEED`.

A Qwen3-VL with fewer than two million parameters: a 192 x 320 screenshot is 60 image tokens. Imports torch and
transformers, so the command that needs it runs it as a separate process.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cua_rl.agent.tools import MAX_COORDINATE
from cua_rl.renderers.qwen3_vl import CHAT_TEMPLATE_PATH
from cua_rl.supervised.demonstrations import COORDINATE_STEP
from scripts.tiny_models.vocabulary import CONTROL_TOKENS, build_tokenizer, names, pieces

_PATCH_SIZE, _MERGE_SIZE, _TEMPORAL_PATCH_SIZE = 16, 2, 2
_MAX_POSITIONS = 4096


def write_untrained_model(folder: Path, *, seed: int) -> None:
    """Write the model folder."""
    tokenizer = build_tokenizer(pieces())
    model = make_model(tokenizer, seed=seed)
    _order_embeddings(model, tokenizer)
    write_model(folder, model, tokenizer)


def make_model(tokenizer: Tokenizer, *, seed: int, **decoder: object) -> Qwen3VLForConditionalGeneration:
    """A model with random float32 weights; `decoder` are settings of its text model that differ from the phones'."""
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(_config(tokenizer, decoder))


def write_model(folder: Path, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write config, weights, tokenizer, preprocessor settings and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(CHAT_TEMPLATE_PATH, folder / "chat_template.jinja")
    model.save_pretrained(folder)
    for name, settings in _settings_files(tokenizer).items():
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _config(tokenizer: Tokenizer, decoder: Mapping[str, object]) -> Qwen3VLConfig:
    text: dict[str, Any] = {
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": _MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        **decoder,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": _PATCH_SIZE,
            "spatial_merge_size": _MERGE_SIZE,
            "temporal_patch_size": _TEMPORAL_PATCH_SIZE,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 400,
            # a decoder layer for each of them, and one more
            "deepstack_visual_indexes": list(range(min(2, text["num_hidden_layers"] - 1))),
        },
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=text["tie_word_embeddings"],
    )


@torch.no_grad()
def _order_embeddings(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Give neighbours similar embeddings: image positions, numbers, and a name with its form at the start of a line."""
    places = model.model.visual.pos_embed.weight
    side = round(len(places) ** 0.5)
    axis = torch.arange(side) / side
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    halves = [waves(part.flatten(), places.shape[1] // 2, num_octaves=3.5) for part in (rows, columns)]
    places.copy_(0.5 * torch.cat(halves, dim=1))
    embeddings = model.model.language_model.embed_tokens.weight
    scale = embeddings.std() * 2**0.5
    numbers = range(0, MAX_COORDINATE + 1, COORDINATE_STEP)
    numbered = waves(torch.tensor(numbers) / MAX_COORDINATE, embeddings.shape[1], num_octaves=6.0)
    embeddings[[_id(tokenizer, str(number)) for number in numbers]] = scale * numbered
    line_start = embeddings[_id(tokenizer, "user\n")].clone()
    for name in names():
        embeddings[_id(tokenizer, f"\n{name}")] = embeddings[_id(tokenizer, f" {name}")] + line_start


def waves(positions: torch.Tensor, size: int, *, num_octaves: float) -> torch.Tensor:
    """Sines and cosines of positions in [0, 1], from half a period upwards; [num_positions, size]."""
    frequencies = torch.pi * 2 ** torch.linspace(0, num_octaves, size // 2)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _settings_files(tokenizer: Tokenizer) -> dict[str, object]:
    image = {
        "patch_size": _PATCH_SIZE,
        "merge_size": _MERGE_SIZE,
        "temporal_patch_size": _TEMPORAL_PATCH_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    factor = _PATCH_SIZE * _MERGE_SIZE
    range_px = {"shortest_edge": 4 * factor**2, "longest_edge": 1024 * factor**2}
    return {
        "preprocessor_config.json": image
        | {"size": range_px, "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"},
        "video_preprocessor_config.json": image
        | {"size": range_px, "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen3VLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(CONTROL_TOKENS[1:]),
            "model_max_length": _MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
        # sampling without top-k and top-p at temperature 1, as training assumes
        "generation_config.json": {
            "eos_token_id": [_id(tokenizer, "<|im_end|>"), _id(tokenizer, "<|endoftext|>")],
            "pad_token_id": _id(tokenizer, "<|endoftext|>"),
            "do_sample": True,
            "temperature": 1.0,
        },
    }


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


if __name__ == "__main__":
    write_untrained_model(Path(sys.argv[1]), seed=int(sys.argv[2]))
