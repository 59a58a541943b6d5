"""A LoRA adapter on disk, looked at without torch: is it whole, does it fit the model, does it change anything?"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cua_rl.errors import ConfigError, boundary
from cua_rl.run.checkpoint_damage import find_damage

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A peft folder with a LoRA adapter."""

    path: Path
    rank: int
    policy_version: int
    """By the folder's name, as in sampler_weights/000048; 0 if it has none."""
    changes_model: bool
    """False if every update is zero, as of a fresh adapter."""


def load_adapter_folder(path: Path, model_path: Path) -> AdapterFolder:
    """Look at an adapter for the model in `model_path`.

    Raises:
        ConfigError: there is none, it is damaged, or it is for another model.
    """
    folder = path.expanduser().absolute()
    missing = [name for name in (CONFIG_NAME, WEIGHTS_NAME) if not (folder / name).is_file()]
    damage = f"no {' and no '.join(missing)}" if missing else find_damage(folder)
    if damage is not None:
        raise ConfigError(
            f"adapter: expected a folder with a LoRA adapter, such as sampler_weights/<step> of a run, got "
            f"{str(path)!r} ({damage}); look into the checkpoints.jsonl of that run"
        )
    with boundary(ConfigError, f"adapter: {str(folder)!r} cannot be read"):
        settings: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        rank = int(settings["r"])
        header, changes_model = _read_weights(folder / WEIGHTS_NAME)
    _require_fit(folder, header, model_path)
    return AdapterFolder(
        path=folder,
        rank=rank,
        policy_version=int(folder.name) if folder.name.isdecimal() else 0,
        changes_model=changes_model,
    )


def _read_weights(path: Path) -> tuple[Mapping[str, Mapping[str, Any]], bool]:
    """The tensors' shapes by name, and whether any B matrix has a byte that is not zero."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = cast("dict[str, dict[str, Any]]", json.loads(data[8:start]))
    header.pop("__metadata__", None)
    spans = [entry["data_offsets"] for name, entry in header.items() if "lora_B" in name]
    return header, any(data[start + low : start + high].strip(b"\0") for low, high in spans)


def _require_fit(folder: Path, header: Mapping[str, Mapping[str, Any]], model_path: Path) -> None:
    """Compare the language model's width and depth with the adapter's tensors."""
    settings: dict[str, Any] = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = settings.get("text_config", settings)
    layers = [int(found[1]) for name in header if (found := re.search(r"language_model\.layers\.(\d+)\.", name))]
    widths = {entry["shape"][1] for name, entry in header.items() if re.search(r"q_proj\.lora_A", name)}
    depth, width = max(layers, default=-1) + 1, int(text.get("hidden_size", 0))
    if depth > int(text.get("num_hidden_layers", depth)) or (widths and widths != {width}):
        raise ConfigError(
            f"adapter: expected one for {model_path.name} (hidden size {width}, {text.get('num_hidden_layers')} "
            f"layers), got {str(folder)!r} for hidden size {sorted(widths)} and {depth} layers; name the model that it "
            "was trained on"
        )
