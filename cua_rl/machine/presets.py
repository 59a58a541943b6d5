"""Settings for common machines: model, context and screens that fit together (`preset=h100-4b`); and the demos.

Each is a set of defaults; settings given beside it win. What a preset leaves out, such as recomputation and sharding,
follows from the memory estimate on the machine at hand. Screens are scaled to 1,024 image tokens, and on the smallest
GPU to 768: 1080x2400 at full size takes 2,550.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cua_rl.models import LADDER_QWEN3_VL

PresetName = Literal["laptop", "ladder", "24gb-4b", "h100-4b", "h100-8b", "4xh100-32b", "8xh100-30b-a3b"]
_MILLION_PIXELS = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePreset:
    """Defaults, and the smallest machine that they are for."""

    machine: str | None
    """GPUs x GiB that their driver reports; None without a GPU."""
    settings: Mapping[str, object]


def _on_80_gb(model: str, *, max_turns: int, max_model_len: int) -> Mapping[str, object]:
    return {
        "model_name": f"Qwen/Qwen3-VL-{model}-Instruct",
        "max_turns": max_turns,
        "max_tokens": 1024,
        "server.max_model_len": max_model_len,
        "server.max_pixels": _MILLION_PIXELS,
    }


EMBEDDED_DEMO: dict[str, object] = {
    "tasks": {"source_type": "demo_training", "tags": ["demo"]},
    "eval_tasks": {"source_type": "demo_eval", "tags": ["demo"]},
    "lora_rank": 16,
    "group_size": 8,
    "groups_per_batch": 16,
    "learning_rate": 2e-3,
    "learning_rate_schedule": "linear",
    "advantages": "mean_std",
    "loss.normalisation": "token_mean",
    "max_steps": 24,
    "evaluation.eval_temperature": 0.5,
    "max_tokens": 48,
    "server.max_model_len": 2048,
    "eval_every": 0,
    "trainer.parity_limit": 0.02,
}
"""Settings of the embedded demo, used if no model is given: the tiny model learns in minutes on two cores."""

MACHINE_PRESETS: Mapping[PresetName, MachinePreset] = {
    "laptop": MachinePreset(machine=None, settings={"max_concurrent_rollouts": 16}),
    "ladder": MachinePreset(
        machine=None,
        settings={
            **EMBEDDED_DEMO,
            "model_name": str(LADDER_QWEN3_VL),
            "tasks": {"source_type": "demo_training"},
            "eval_tasks": {"source_type": "demo_eval"},
            "max_turns": 15,
            "max_tokens": 96,
            "max_steps": 40,
            "learning_rate": 1e-3,
            "server.max_model_len": 3072,
            "curriculum.task_sampling": "success_rate",
        },
    ),
    "24gb-4b": MachinePreset(
        machine="1x22.5",
        settings={
            "model_name": "Qwen/Qwen3-VL-4B-Instruct",
            "max_turns": 10,
            "max_tokens": 512,
            "agent.history": "block_drop",
            "agent.history_images": 4,
            "server.max_model_len": 8192,
            "server.max_pixels": 3 * _MILLION_PIXELS // 4,
        },
    ),
    "h100-4b": MachinePreset(machine="1x79.6", settings=_on_80_gb("4B", max_turns=20, max_model_len=32768)),
    "h100-8b": MachinePreset(machine="1x79.6", settings=_on_80_gb("8B", max_turns=20, max_model_len=32768)),
    "4xh100-32b": MachinePreset(machine="4x79.6", settings=_on_80_gb("32B", max_turns=15, max_model_len=22528)),
    "8xh100-30b-a3b": MachinePreset(
        machine="8x79.6",
        # a GPU that holds the model has room for two contexts beside it; two GPUs that share it, for 24
        settings={**_on_80_gb("30B-A3B", max_turns=20, max_model_len=32768), "server.tensor_parallel": 2},
    ),
}
