"""Rollouts of a computer-use agent, given instead of sampled, and random models of two sizes to train on them.

Rollouts are plain data, a function of the workload and its seed alone, so that different trainers get the same ones.
Only `build_model` and `write_adapter` need torch.
"""

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from benchmarks.claims import require

PAD, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(7)
FIRST_TEXT_ID = 16
FIRST_PROMPT_TEXT, LATER_PROMPT_TEXT, SAMPLED = 80, 25, 30
"""Text tokens of the first turn's prompt (instructions and task) and of what each later turn adds; sampled tokens."""
LORA_RANK, LORA_ALPHA = 16, 32
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
PREPROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 16777216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTurn:
    """What a turn adds to the context, and what was sampled then."""

    prompt_ids: list[int]
    """One IMAGE_PAD per image token."""
    screenshot: bytes
    sampled_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRollout:
    """All turns of one attempt; every prompt extends the prompt and the answer before it."""

    group: int
    reward: float
    turns: list[GivenTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many rollouts of which shape."""

    turns: int
    vocabulary: int
    groups: int = 2
    group_size: int = 4
    height_px: int = 288
    width_px: int = 512
    seed: int = 0

    @property
    def num_rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def image_tokens(self) -> int:
        return (self.height_px // 32) * (self.width_px // 32)

    @property
    def num_screenshots(self) -> int:
        """Different ones: members of a group share their first."""
        return self.groups + self.num_rollouts * (self.turns - 1)

    @property
    def final_length(self) -> int:
        """Tokens of a whole rollout."""
        per_turn = self.image_tokens + SAMPLED
        return FIRST_PROMPT_TEXT + LATER_PROMPT_TEXT * (self.turns - 1) + self.turns * per_turn


def make_rollouts(work: Workload) -> list[GivenRollout]:
    """Group by group; members of a group begin on the same screen, and both rewards occur in every group."""
    rng = random.Random(work.seed)
    rollouts: list[GivenRollout] = []
    for group in range(work.groups):
        first = _prompt(rng, work, FIRST_PROMPT_TEXT), _draw_screenshot(rng, work)
        rewards = [1.0, 0.0, *(float(rng.randrange(2)) for _ in range(work.group_size - 2))]
        rng.shuffle(rewards)
        for reward in rewards:
            shown = [first] + [
                (_prompt(rng, work, LATER_PROMPT_TEXT), _draw_screenshot(rng, work)) for _ in range(work.turns - 1)
            ]
            turns = [
                GivenTurn(prompt_ids=ids, screenshot=png, sampled_ids=[*_text(rng, work, SAMPLED - 1), IM_END])
                for ids, png in shown
            ]
            rollouts.append(GivenRollout(group=group, reward=reward, turns=turns))
    return rollouts


def group_advantages(rollouts: list[GivenRollout]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4) inside each group, the deviation with n - 1."""
    advantages: list[float] = []
    for rollout in rollouts:
        rewards = [other.reward for other in rollouts if other.group == rollout.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        advantages.append((rollout.reward - mean) / (std + 1e-4))
    return advantages


def require_steps(
    work: Workload, num_steps: int, grad_norms: Sequence[float], accounts: Sequence[Mapping[str, float]]
) -> None:
    """Refuse figures unless every step trained on all that was sampled, and encoded each of its screenshots."""
    require(
        "steps of the trainer",
        steps=(num_steps, len(accounts)),
        steps_that_change_weights=(num_steps, sum(0 < norm < math.inf for norm in grad_norms)),
        trained_tokens=(
            {work.num_rollouts * work.turns * SAMPLED},
            {one["trainer/trained_tokens"] for one in accounts},
        ),
        encoded_screenshots=({work.num_screenshots}, {one["trainer/encoded_images"] for one in accounts}),
    )


def _text(rng: random.Random, work: Workload, count: int) -> list[int]:
    return [rng.randrange(FIRST_TEXT_ID, work.vocabulary) for _ in range(count)]


def _prompt(rng: random.Random, work: Workload, num_text: int) -> list[int]:
    text = _text(rng, work, num_text - 3)  # the other three are the marks
    return [IM_START, *text, VISION_START, *[IMAGE_PAD] * work.image_tokens, VISION_END]


def _draw_screenshot(rng: random.Random, work: Workload) -> bytes:
    def colour() -> tuple[int, int, int]:
        return rng.randrange(256), rng.randrange(256), rng.randrange(256)

    screen = Image.new("RGB", (work.width_px, work.height_px), colour())
    draw = ImageDraw.Draw(screen)
    for _ in range(20):
        x, y = rng.randrange(work.width_px), rng.randrange(work.height_px)
        draw.rectangle((x, y, x + rng.randrange(8, 160), y + rng.randrange(8, 90)), fill=colour())
    png = io.BytesIO()
    screen.save(png, "PNG")
    return png.getvalue()


SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tiny": {
        "text": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 1024,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 3,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "medium": {
        "text": {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 32768,
        },
        "vision": {
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    },
}


def build_model(size: str, folder: Path) -> Path:
    """Write a random Qwen3-VL: 1.7 million parameters (tiny) or 16 million, half of them vocabulary (medium)."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    sixth = text["head_dim"] // 6
    section = [text["head_dim"] // 2 - 2 * sixth, sixth, sixth]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section, "mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        tie_word_embeddings=True,
        text_config={**text, "max_position_embeddings": 8192, "rope_parameters": rope, "tie_word_embeddings": True},
        vision_config={**vision, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 1024},
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def write_adapter(model_folder: Path, folder: Path) -> Path:
    """Write the adapter that every trainer starts from: the usual random A, and B = 0."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3VLForConditionalGeneration

    base = Qwen3VLForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(0)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(folder)
    return folder
