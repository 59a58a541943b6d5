"""Settings for common machines: model, context and screens that fit together (`preset=h100-4b`).

Each is a set of defaults; settings given beside it win. What a preset leaves out, such as recomputation and sharding,
follows from the memory estimate on the machine at hand. Screens are scaled to 1,024 image tokens, and on the smallest
GPU to 768: 1080x2400 at full size takes 2,550.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PresetName = Literal["laptop", "24gb-4b", "h100-4b", "h100-8b", "4xh100-32b", "8xh100-30b-a3b"]
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


MACHINE_PRESETS: Mapping[PresetName, MachinePreset] = {
    "laptop": MachinePreset(machine=None, settings={"max_concurrent_rollouts": 16}),
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
        # a GPU that holds the model has room for two contexts beside it; two GPUs that share it, for 24 (docs/gpus.md)
        settings={**_on_80_gb("30B-A3B", max_turns=20, max_model_len=32768), "server.tensor_parallel": 2},
    ),
}
