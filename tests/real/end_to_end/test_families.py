"""Tiny random models of families other than Qwen3-VL: trained with vLLM, exported, and served from the export."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import random

import pytest
from tokenizers import Tokenizer

from cua_rl.recipes.export_model import main as export_model
from cua_rl.renderers.renderer import make_renderer
from cua_rl.reporting.json_lines import read_records
from cua_rl.rewards.evidence import Evidence
from cua_rl.sampling.address import server_client
from cua_rl.sampling.canary import Canary, canary_request, canary_tokens, parse_canary
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from tests.patience import patience
from tests.real.end_to_end.runs import Run
from tests.real.sampling.tiny_model import adapter_logprobs
from tests.real.training.tiny_families import (
    build_random_qwen2_5_vl,
    build_random_qwen3_5,
    build_random_qwen3_5_moe,
    build_random_qwen3_vl_moe,
)
from tests.renderers.model_folders import build_qwen2_5_folder, build_qwen3_5_folder, build_small_folder

pytestmark = pytest.mark.timeout(600)

OPTIONS = (
    *("max_steps=2", "group_size=2", "groups_per_batch=1", "max_turns=2", "max_tokens=12", "max_model_len=6144"),
    *("learning_rate=0.01", "lora_rank=8", "parity_limit=0.0001", "eval_tasks=none", "monitor=false"),
    "lora_modules=language,merger,vision",
    "reward=tests.real.end_to_end.test_families:by_chance",
    'tasks={"source_type": "demo_training", "tags": ["demo"]}',
)
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 8192}  # heads of 32, as vLLM wants
VISION = {"hidden_size": 96, "out_hidden_size": 128}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


def by_chance(_: Evidence) -> float:
    """A random model solves nothing, and members of a group with equal rewards teach nothing."""
    return random()


def tokens_of(folder: Path) -> dict[str, int]:
    """The special tokens of the tokenizer in a folder, by their names in a config.json."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")
    names += ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>")
    return {name: tokenizer.token_to_id(token) for name, token in names}


def widths_of(folder: Path) -> dict[str, object]:
    """Widths that vLLM serves, with the vocabulary of the folder's tokenizer, padded as those of real models are."""
    return {**WIDTHS, "vocab_size": Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + 32}


def build_qwen2_5(folder: Path) -> Path:
    build_qwen2_5_folder(build_small_folder(folder.parent / "small"), folder)
    return build_random_qwen2_5_vl(folder, text=widths_of(folder), vision=VISION, **tokens_of(folder))


def build_qwen3_vl_moe(folder: Path) -> Path:
    build_small_folder(folder)
    heads = {"head_dim": 32, "rope_parameters": ROPE}
    return build_random_qwen3_vl_moe(folder, text=widths_of(folder) | heads, vision=VISION, **tokens_of(folder))


def build_qwen3_5(folder: Path, build: Callable[..., Path] = build_random_qwen3_5, **text: object) -> Path:
    build_qwen3_5_folder(build_small_folder(folder.parent / "small"), folder)
    heads = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}  # no less with vLLM on a CPU
    partly = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
    return build(folder, text=widths_of(folder) | heads | partly | text, vision=VISION, **tokens_of(folder))


async def served_logprobs(model: Path, canary: Canary) -> tuple[float, ...]:
    config = ServerConfig(model_path=model, max_lora_rank=8, max_model_len=1024, max_num_seqs=4, max_images=1)
    async with VllmServer(config, model.parent / "vllm.log") as server:
        async with server_client(server.base_url, server.api_key, timeout_s=patience(60.0)) as client:
            path, request = canary_request(canary)
            answer = await client.post(path, json={"model": "base", **request})
    return parse_canary(answer.raise_for_status().json(), canary)


def assert_trains(model: Path, folder: Path, *options: str, parity: float) -> None:
    """Two steps with a server of our own: sampler and trainer agree, and every prompt is the renderer's."""
    run = Run(folder, f"model_name={model}", *OPTIONS, *options)

    assert run.finish() == 0, run.output()
    steps = [record for record in read_records(run.folder / "metrics.jsonl") if "policy/parity_mean_abs" in record]
    assert len(steps) == 2
    assert all(step["policy/parity_mean_abs"] <= parity for step in steps)  # type: ignore[operator]
    assert all(step["rollout/prompt_mismatches"] == 0 for step in steps)


def test_a_random_qwen2_5_vl_is_trained_exported_and_served(tmp_path: Path) -> None:
    model = build_qwen2_5(tmp_path / "model")

    folder = tmp_path / "run"
    assert_trains(model, folder, parity=1e-4)

    assert export_model([f"run={folder}", f"out={tmp_path / 'export'}"]) == 0
    renderer = make_renderer(tmp_path / "export")
    canary = Canary(tokens=canary_tokens(renderer), changes_model=True)
    served = asyncio.run(served_logprobs(tmp_path / "export", canary))
    base = adapter_logprobs(model, None, canary.tokens)[1:]
    adapted = adapter_logprobs(model, folder / "sampler_weights" / "000002", canary.tokens)[1:]
    assert export_model([f"run={folder}", f"out={tmp_path / 'adapter'}", "kind=adapter"]) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model)
    exported = adapter_logprobs(model, tmp_path / "adapter", canary.tokens)[1:]
    assert exported == adapted
    assert served == pytest.approx(adapted, abs=1e-3)
    assert max(abs(one - other) for one, other in zip(base, adapted, strict=True)) > 0.01


@pytest.mark.parametrize(("build", "parity"), [(build_random_qwen3_5, 0.1), (build_random_qwen3_5_moe, 0.3)])
def test_a_random_model_with_linear_attention_is_trained_with_a_server_in_half_precision(
    tmp_path: Path, build: Callable[..., Path], parity: float
) -> None:
    """Linear attention is bfloat16 on a CPU, so parity holds to that rounding; prompts are equal all the same."""
    model = build_qwen3_5(tmp_path / "model", build)
    assert_trains(model, tmp_path / "run", "lora_modules=language", "parity_limit=none", parity=parity)


def test_a_random_mixture_of_experts_is_trained_with_a_server_that_agrees(tmp_path: Path) -> None:
    assert_trains(build_qwen3_vl_moe(tmp_path / "model"), tmp_path / "run", "lora_modules=language", parity=1e-4)
