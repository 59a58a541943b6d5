# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Sampler against trainer at the real shapes of models, in bfloat16 on a CPU: a nightly check.

    .venv/bin/python -m benchmarks.real_shapes [2b 30b-a3b qwen2.5-vl-7b qwen3.5-9b]

`2b` is a whole Qwen3-VL-2B, up to 17 GiB and some minutes; the others have the widths of their models, but few layers.
Weights are random, in several files. A shape goes through the doctor's checks: the model server and trainer that a run
would start, a strong random adapter in both, one training step, and log-probabilities of sampled tokens after text and
after screenshots of 720x1280. One JSON line per check; the status is 1 if one failed. vLLM on a CPU serves no adapters
for a mixture of experts: of that, the base model is compared, before the step.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import parse_command_line
from cua_rl.doctor.doctor import check_canary, check_parity, check_plan, compare_answers, start_server, start_trainer
from cua_rl.doctor.examination import Examination, long_datum
from cua_rl.environments.device import Screen
from cua_rl.host.processes import free_port
from cua_rl.machine.memory_parts import GIB
from cua_rl.reporting.diagnosis import Diagnosis, Finding
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.sampling.vllm_command import vllm_command
from cua_rl.training.config import LossConfig
from tests.renderers.model_folders import build_qwen2_5_folder, build_qwen3_5_folder, build_small_folder

CONFIGS = Path(__file__).parents[1] / "tests" / "machine" / "model_configs"
SCREEN = Screen(kind="android", width_px=720, height_px=1280)
MAX_PIXELS = 720 * 1280
STEP_TOKENS = 1280  # one screenshot, and an answer of about 300 tokens
NUM_FILES = 3
SETTINGS = (
    *("server.dtype=bfloat16", "trainer.dtype=bfloat16", "trainer.gradient_checkpointing=true"),
    *("server.max_model_len=4096", f"server.max_pixels={MAX_PIXELS}", "server.start_timeout_s=900"),
    *("max_turns=1", "max_tokens=16", "eval_tasks=none", "learning_rate=0.001", "trainer.vision_cache_gib=1"),
)


def qwen3_vl_2b() -> dict[str, Any]:
    """The whole model."""
    return json.loads((CONFIGS / "Qwen3-VL-2B-Instruct" / "config.json").read_text())


def qwen3_vl_30b_a3b() -> dict[str, Any]:
    """Four layers of language model and vision tower; deepstack at the last three of the latter."""
    config = json.loads((CONFIGS / "Qwen3-VL-30B-A3B-Instruct" / "config.json").read_text())
    # as in the published file; vLLM needs it, Transformers always normalises
    config["text_config"] |= {"num_hidden_layers": 4, "norm_topk_prob": True}
    config["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [1, 2, 3]}
    return config


def qwen2_5_vl_7b() -> dict[str, Any]:
    """Three layers of the language model; four of the vision tower, the last with full attention."""
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    text |= {"num_hidden_layers": 3, "vocab_size": 152064, "max_position_embeddings": 128000, "rope_parameters": rope}
    vision = {"depth": 4, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3]}
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}


def qwen3_5_9b() -> dict[str, Any]:
    """Four layers, three with linear attention; a quarter of the vocabulary, whose float32 head would take 4 GiB."""
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4}
    text |= {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    text |= {"linear_value_head_dim": 128, "num_hidden_layers": 4, "vocab_size": 62080}
    text |= {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
    text |= {"max_position_embeddings": 262144, "rope_parameters": rope | {"partial_rotary_factor": 0.25}}
    vision = {"depth": 4, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}


SHAPES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "2b": qwen3_vl_2b,
    "30b-a3b": qwen3_vl_30b_a3b,
    "qwen2.5-vl-7b": qwen2_5_vl_7b,
    "qwen3.5-9b": qwen3_5_9b,
}


def build_model(shape: Mapping[str, Any], folder: Path) -> int:
    """A model folder with random weights, as published ones are laid out; returns the number of parameters."""
    build = {"qwen2_5_vl": build_qwen2_5_folder, "qwen3_5": build_qwen3_5_folder}.get(shape["model_type"])
    small = build_small_folder(folder if build is None else folder.parent / "small")
    if build is not None:
        build(small, folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        if "size" in settings:
            settings["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
        else:
            settings |= {"min_pixels": 3136, "max_pixels": 12845056}
        (folder / name).write_text(json.dumps(settings))
    fill_vocabulary(folder / "tokenizer.json", shape["text_config"]["vocab_size"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    ids = {name: tokenizer.token_to_id(token) for name, token in names.items()}
    config = AutoConfig.for_model(**{**shape, **ids})
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    weights: dict[str, torch.Tensor] = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if config.model_type.endswith("_moe"):  # published files have experts' inputs before their outputs
        weights = {
            name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in weights.items()
        }
    size = sum(one.nbytes for one in weights.values())
    save_torch_state_dict(weights, folder, max_shard_size=int(size / NUM_FILES * 1.15))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return sum(one.numel() for one in weights.values())


def fill_vocabulary(path: Path, size: int) -> None:
    """Give every token a text: for answers without any, the server gives no log-probabilities."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    vocabulary |= {f"filler{index}": index for index in range(len(vocabulary), size)}
    path.write_text(json.dumps(tokenizer))


class RealShape(Examination):
    """The doctor's examination with screenshots of one size."""

    @property
    def screen(self) -> Screen:
        return SCREEN


async def serve_without_adapters(model: Path, log: Path, stack: AsyncExitStack) -> str:
    """Start a server that a run takes for one of the user's own; returns its address."""
    config = ServerConfig(
        model_path=model,
        max_model_len=4096,
        max_num_seqs=8,
        max_pixels=MAX_PIXELS,
        dtype="bfloat16",
        start_timeout_s=900.0,
        port=free_port(),
    )

    def command(config: ServerConfig, address: str) -> list[str]:
        return [word for word in vllm_command(config, address) if word != "--enable-lora"]

    server = await stack.enter_async_context(VllmServer(config, log, make_command=command))
    os.environ[API_KEY_VARIABLE] = server.api_key
    return server.base_url


async def check_step(exam: Examination) -> Finding:
    """One training step on a screenshot and an answer."""
    datum = long_datum(exam, 0, STEP_TOKENS)
    (row,) = await exam.trainer.forward([datum])
    await exam.trainer.trainer_metrics()  # starts the count again
    await exam.trainer.forward_backward([replace(datum, sampling_logprobs=row)], LossConfig())
    done = await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=exam.config.learning_rate))
    metrics = await exam.trainer.trainer_metrics()
    figures = {"tokens_per_s": metrics["trainer/tokens"] / metrics["trainer/busy_s"], "grad_norm": done.grad_norm}
    is_good = 0 < done.grad_norm < float("inf")
    return Finding(verdict="ok" if is_good else "fail", got=f"|gradient| {done.grad_norm:.3g}", figures=figures)


def peak_kib(pid: int) -> int:
    """The most that a process has held; 0 of one that is ending."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)


async def check_memory(exam: Examination) -> Finding:
    """The most memory that trainer and server have held, with what they map of the model's files."""
    peaks: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        peaks["trainer" if "cua_rl.training" in " ".join(process.cmdline()) else "server"] += peak_kib(process.pid)
    figures = {f"{part}_peak_gib": kib * 1024 / GIB for part, kib in sorted(peaks.items())}
    return Finding(verdict="ok", got=", ".join(f"{name} {gib:.1f}" for name, gib in figures.items()), figures=figures)


Check = Callable[[Examination], Awaitable[Finding]]
CHECKS: Mapping[str, Check] = {
    "plan": check_plan,
    "server": start_server,
    "trainer": start_trainer,
    "canary": check_canary,
    "step": check_step,
    "parity": check_parity,
    "memory": check_memory,
}
BASE_MODEL_CHECKS: Mapping[str, Check] = {
    "plan": check_plan,
    "server": start_server,
    "trainer": start_trainer,
    "parity": compare_answers,
    "step": check_step,
    "memory": check_memory,
}


async def measure(name: str, folder: Path) -> bool:
    """Build the shape in `folder`, check it, print what was found; whether all is well."""
    shape = SHAPES[name]()
    model, logs = folder / "model", folder / "logs"
    num_parameters = build_model(shape, model)
    is_moe = shape["model_type"].endswith("_moe")
    logs.mkdir()
    diagnosis = Diagnosis(folder)
    clock = time.monotonic()
    async with AsyncExitStack() as stack:
        server = [f"base_url={await serve_without_adapters(model, logs / 'vllm.log', stack)}"] if is_moe else []
        config = parse_command_line(CLIConfig, [f"model_name={model}", *SETTINGS, *server])
        exam = RealShape(config=config, folder=folder, stack=stack)
        for check, find in (BASE_MODEL_CHECKS if is_moe else CHECKS).items():
            finding = await diagnosis.check(check, partial(find, exam))
            print_line(name, check, finding, num_parameters)
            if finding.verdict == "fail":
                for log in logs.glob("*.log"):
                    print("\n".join([str(log), *log.read_text().splitlines()[-60:]]), file=sys.stderr)
                break
    total_s = round(time.monotonic() - clock)
    print(json.dumps({"figure": "real_shapes_total", "shape": name, "seconds": total_s}), flush=True)
    return not diagnosis.failed()


def print_line(shape: str, check: str, finding: Finding, num_parameters: int) -> None:
    """One JSON line; numbers with four digits."""
    line: dict[str, object] = {"figure": f"real_shapes_{check}", "shape": shape, "parameters": num_parameters}
    line |= {"verdict": finding.verdict, "got": finding.got, "seconds": finding.seconds}
    if check != "plan":
        line |= {key: float(f"{value:.4g}") for key, value in finding.figures.items() if isinstance(value, float | int)}
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the named shapes, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], metavar="SHAPE", help=", ".join(SHAPES))
    names = parser.parse_args(argv).shapes or list(SHAPES)
    logging.basicConfig(level=logging.WARNING)
    is_well = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            is_well &= asyncio.run(measure(name, Path(folder)))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
