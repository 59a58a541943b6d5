"""What the baseline counts for sampling against PyTorch's own count of a whole model's operations."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.gpu_baseline import Request, sampling_flop
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.training.vision import ImagePreprocessor
from tests.real.training.tiny_qwen3_vl import IMAGE_PAD, VISION_END, VISION_START, draw_screenshot, image_chunk

NUM_TOKENS, PATCHES, IMAGE_TOKENS = 40, 24, 6


def test_sampling_costs_what_pytorch_counts_for_a_prompt_and_its_first_token(model_path: Path) -> None:
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(model_path, attn_implementation="eager")
    chunk = image_chunk(draw_screenshot(random.Random(0)))
    (image,) = ImagePreprocessor(model_path).prepare([chunk]).values()
    patches = image.patches.view(PATCHES, 3, 1, -1).repeat(1, 1, 2, 1).view(PATCHES, -1)  # two equal frames
    tokens = [VISION_START, *[IMAGE_PAD] * IMAGE_TOKENS, VISION_END]
    tokens += range(16, 16 + NUM_TOKENS - len(tokens))
    inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([image.grid]), "logits_to_keep": 1}
    types = torch.tensor([[int(token == IMAGE_PAD) for token in tokens]])

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([tokens]), mm_token_type_ids=types, **inputs)
    request = Request(
        step=1, start_s=0.0, end_s=1.0, prompt=NUM_TOKENS, cached=0, sampled=1, screenshots={"a": IMAGE_TOKENS}
    )
    flop = sampling_flop(load_model_sizes(model_path), 0, [request])

    # what a token does not see is computed by this attention, which is not causal: 3 layers, 64 wide, scores and values
    unseen = 4 * 3 * 64 * NUM_TOKENS * (NUM_TOKENS - 1) // 2
    # norms, biases and the tower's positions count as products of a token or patch: under 1 % in published models
    visual = dict(model.model.visual.named_parameters())
    vectors = sum(one.numel() for name, one in visual.items() if one.ndim == 1 or "pos_embed" in name)
    norms = sum(one.numel() for one in model.model.language_model.layers.parameters() if one.ndim == 1)
    assert flop + unseen - 2 * (vectors * PATCHES + norms * NUM_TOKENS) == pytest.approx(
        counter.get_total_flops(), rel=1e-3
    )
