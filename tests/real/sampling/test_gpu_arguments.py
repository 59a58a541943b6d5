"""The server's command line on GPUs, before the installed vLLM's own parser and checks for CUDA."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cua_rl.host.users import computing_environment
from cua_rl.machine.gpus import GpuPlacement
from cua_rl.machine.machine import Machine
from cua_rl.machine.memory_parts import Request
from cua_rl.machine.memory_plan import plan_memory
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.images import load_image_settings
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.vllm_command import vllm_options
from cua_rl.training.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published model, and the GPUs that it is run on."""

    text: dict[str, int]
    num_gpus: int
    memory_gib: float
    tensor_parallel: int
    """Expected: the fewest GPUs that hold the weights and one context."""
    max_model_len: int = 16384
    model_type: str = "qwen3_vl"


def text(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": 128,
        **more,
    }


FOUR_B = text(2560, 36, 32, 8, 9728)
EXPERTS = text(2048, 48, 32, 4, 6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
SHAPES = {
    "4b-24gb": Shape(text=FOUR_B, num_gpus=1, memory_gib=23.5, tensor_parallel=1, max_model_len=8192),
    "4b": Shape(text=FOUR_B, num_gpus=1, memory_gib=79.6, tensor_parallel=1),
    "8b": Shape(text=text(4096, 36, 32, 8, 12288), num_gpus=2, memory_gib=79.6, tensor_parallel=1),
    "32b": Shape(text=text(5120, 64, 64, 8, 25600), num_gpus=4, memory_gib=63.6, tensor_parallel=2),
    "30b-a3b": Shape(text=EXPERTS, num_gpus=8, memory_gib=79.6, tensor_parallel=1, model_type="qwen3_vl_moe"),
}


def make_folder(shape: Shape, folder: Path) -> Path:
    """The model's configuration with the tiny model's tokenizer, and no weights: nothing is loaded."""
    shutil.copytree(TINY_QWEN3_VL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["model_type"], config["text_config"]["model_type"] = shape.model_type, f"{shape.model_type}_text"
    if shape.model_type == "qwen3_vl_moe":
        config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["text_config"] |= shape.text | {"max_position_embeddings": 262144}
    config["text_config"].pop("layer_types", None)
    config["vision_config"]["out_hidden_size"] = shape.text["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_shape(shape: Shape, folder: Path) -> GpuPlacement:
    images = load_image_settings(folder)
    request = Request(
        model=load_model_sizes(folder),
        machine=Machine(gpus=tuple(map(str, range(shape.num_gpus))), gpu_gib=shape.memory_gib, host_gib=None),
        server=ServerConfig(),
        trainer=TrainerConfig(),
        context_tokens=shape.max_model_len,
        largest_image_tokens=images.max_pixels // images.factor_px**2,
    )
    return plan_memory(request).gpus


@pytest.fixture(scope="module")
def engine_configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process for all: most of its time is vLLM's imports."""
    options: list[list[str]] = []
    for name, shape in SHAPES.items():
        folder = make_folder(shape, tmp_path_factory.mktemp("models") / name)
        plan = plan_shape(shape, folder)
        config = ServerConfig(
            model_path=folder,
            max_lora_rank=32,
            max_model_len=shape.max_model_len,
            max_images=20,
            gpu_memory_utilization=0.85,
            tensor_parallel=plan.tensor_parallel,
            vllm_args="--max-num-batched-tokens 8192",
        )
        options.append(vllm_options(config, "unix:/vllm.sock", "cuda"))
    script = Path(__file__).with_name("cuda_engine_config.py")
    done = subprocess.run(
        [sys.executable, script, *map(json.dumps, options)],
        env=computing_environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(SHAPES, json.loads(done.stdout.strip().rpartition("\n")[2]), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_vllm_takes_the_command_line_of_every_gpu_shape(name: str, engine_configs: dict[str, dict[str, Any]]) -> None:
    shape, found = SHAPES[name], engine_configs[name]

    assert found == {
        "architecture": "Qwen3VLMoeForConditionalGeneration" if "a3b" in name else "Qwen3VLForConditionalGeneration",
        "dtype": "torch.bfloat16",
        "head_dtype": "torch.float32",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel": shape.tensor_parallel,
        "data_parallel": 1,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "prefix_caching": True,
        "gpu_memory_utilization": 0.85,
        "lora_rank": 32,
        "lora_modules": ["q_proj", "k_proj", "v_proj", "o_proj"] if "a3b" in name else None,
        "max_model_len": shape.max_model_len,
        "eager": False,
    }
