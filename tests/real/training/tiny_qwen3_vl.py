"""A random Qwen3-VL on disk, small enough for tests, and datums for it."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tests.builders import stored_image

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, FIRST_TEXT_ID = 3, 4, 5, 6, 16
TINY_ROUNDINGS = 8000
"""The longest chain of roundings in a step of the tiny model, for `tests.rounding`.

A layer has six products in series (attention's four, the MLP's two) of up to 128 terms: three layers 2,304, with the
head and its softmax 64 + 320 more: about 2,700. The backward pass is a chain twice as long.
"""
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 1048576},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_random_qwen3_vl(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 3,  # one more than deepstack levels, so that every level reaches the answer
    vocabulary: int = 320,
    vision_hidden: int = 48,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Write config, weights and preprocessor settings; deepstack at both vision layers, patch 16, merge 2."""
    head_dim = hidden // 4
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "vocab_size": vocabulary,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tie_embeddings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # wide enough that images and positions matter to the answer
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.15)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def draw_screenshot(rng: random.Random, *, width: int = 96, height: int = 64) -> bytes:
    """A PNG of random blocks."""
    pixels = Image.new("RGB", (width // 8, height // 8))
    pixels.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range((width // 8) * (height // 8))])
    buffer = io.BytesIO()
    pixels.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def image_chunk(png: bytes, token_px: int = 32) -> ImageChunk:
    """The image with its number of tokens: one per `token_px` squared (sides are multiples of that)."""
    image = stored_image(png)
    return ImageChunk(image=image, expected_tokens=(image.width_px // token_px) * (image.height_px // token_px))


def make_datum(
    rng: random.Random,
    pngs: Sequence[bytes],
    *,
    text: int = 6,
    sampled: int = 5,
    vocabulary: int = 320,
    token_px: int = 32,
    sampling_logprobs: Sequence[float] | None = None,
) -> Datum:
    """Per image: text, image, sampled tokens (trained). Without images: one turn of text."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TEXT_ID, vocabulary) for _ in range(count))

    chunks: list[EncodedTextChunk | ImageChunk] = []
    mask: list[bool] = []
    for png in pngs or [None]:
        turn: list[EncodedTextChunk | ImageChunk] = [EncodedTextChunk(tokens=tokens(text))]
        if png is not None:
            turn = [EncodedTextChunk(tokens=(*tokens(text), VISION_START)), image_chunk(png, token_px)]
            turn.append(EncodedTextChunk(tokens=(VISION_END,)))
        mask += [False] * sum(chunk.length for chunk in turn) + [True] * sampled
        chunks += [*turn, EncodedTextChunk(tokens=tokens(sampled))]
    drawn = iter(sampling_logprobs or [-rng.random() - 4.0 for _ in range(sum(mask))])
    advantage = rng.choice([-1.0, 0.5, 2.0])
    return Datum(
        rollout_id=f"rollout-{rng.randrange(10**6)}",
        model_input=ModelInput(chunks=tuple(chunks)),
        loss_mask=tuple(mask),
        advantages=tuple(advantage if trained else 0.0 for trained in mask),
        sampling_logprobs=tuple(next(drawn) if trained else 0.0 for trained in mask),
        policy_versions=(0,) * max(1, len(pngs)),
    )
