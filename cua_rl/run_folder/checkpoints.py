"""Checks that checkpoints and LoRA adapters on disk are complete and fit the model, without torch."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cua_rl.reporting.json_lines import read_records
from cua_rl.training.folders import ADAPTER_WEIGHTS, file_sha256
from cua_rl.types.errors import ConfigError, boundary

MANIFEST_NAME = "checkpoint.json"
ADAPTER_CONFIG = "adapter_config.json"


def find_damage(folder: Path) -> str | None:
    """Describe what is damaged in a checkpoint folder; None if it is complete.

    A folder with a manifest (`{"files": {name: sha256}}`) must match it; without one, every file must have content, and
    .safetensors files must be as long as their headers say.
    """
    if not folder.is_dir():
        return f"{folder} is missing"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return f"{folder} is empty"
    if (folder / MANIFEST_NAME).is_file():
        return _compare_with_manifest(folder)
    return next((damage for file in files if (damage := find_file_damage(file))), None)


def find_saved(text: str, kind: Literal["weights", "sampler_weights"]) -> Path:
    """The folder that a person names: by its path, or as `run@step`; for just a run, its newest `sampler_weights`."""
    run, _, step = text.rpartition("@")
    folder = Path(text).expanduser().absolute()
    if run and step.isdecimal() and not folder.exists():
        return Path(run).expanduser().absolute() / kind / f"{int(step):06d}"
    records = read_records(folder / "checkpoints.jsonl") if kind == "sampler_weights" else []
    return folder / str(records[-1]["sampler_path"]) if records else folder


def find_checkpoint(path: str | None, *, lora_rank: int, lora_alpha: int) -> Path | None:
    """The folder given by `load_checkpoint_path`; raises `ConfigError` if it is damaged or has another LoRA size."""
    if path is None:
        return None
    folder = find_saved(path, "weights")
    if (folder / "checkpoints.jsonl").is_file():  # a whole run: resume it, or start from its newest weights
        states = [str(record["state_path"]) for record in read_records(folder / "checkpoints.jsonl")]
        newest = next((state for state in reversed(states) if find_damage(folder / state) is None), None)
        fresh = f"; to begin another run from its weights, load_checkpoint_path={folder / newest}" if newest else ""
        raise ConfigError(
            f"load_checkpoint_path: expected a folder weights/<step>, got {path!r}, the folder of a run with "
            f"{len(states)} checkpoints; to continue that run, drop it and set log_path={folder} "
            f"behavior_if_log_dir_exists=resume{fresh}"
        )
    damage = find_damage(folder)
    if damage is not None:
        raise ConfigError(
            f"load_checkpoint_path: expected a folder weights/<step> of an earlier run, got {path!r} ({damage}); "
            "look into the checkpoints.jsonl of that run"
        )
    adapter_path = folder / ADAPTER_CONFIG
    adapter: dict[str, Any] = json.loads(adapter_path.read_text(encoding="utf-8")) if adapter_path.is_file() else {}
    rank, alpha = adapter.get("r", 0), adapter.get("lora_alpha", lora_alpha)
    if (rank, alpha) != (lora_rank, lora_alpha):
        raise ConfigError(
            f"load_checkpoint_path: expected weights with lora_rank={lora_rank} lora_alpha={lora_alpha}, got "
            f"lora_rank={rank} lora_alpha={alpha}; set these, or load other weights"
        )
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"load_checkpoint_path: expected a folder weights/<step> with {MANIFEST_NAME}, got {path!r} without; "
            "sampler_weights/<step> is only for model servers, so name weights/<step> of that run"
        )
    return folder


def _compare_with_manifest(folder: Path) -> str | None:
    try:
        expected: dict[str, str] = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST_NAME} is not a manifest: {type(error).__name__}: {error}"
    for name, digest in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file_sha256(file) != digest:
            return f"{file} is not what was saved: its sha256 differs from the manifest's"
    return None


def find_file_damage(file: Path) -> str | None:
    """Describe what is damaged in a file; None if it has content and, as .safetensors, the length its header says."""
    size = file.stat().st_size
    if size == 0:
        return f"{file} is empty"
    if file.suffix != ".safetensors":
        return None
    # 8 bytes of header length, the JSON header, then the tensors
    with file.open("rb") as stream:
        header_length = int.from_bytes(stream.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(stream.read(header_length) if header_length < size else b"")
        except ValueError:
            return f"{file} is cut short"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return None if size == 8 + header_length + max(ends, default=0) else f"{file} is cut short"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A peft folder with a LoRA adapter."""

    path: Path
    rank: int
    policy_version: int
    """From the folder's name (sampler_weights/000048); 0 if the name is not a number."""
    changes_model: bool
    """False if all B matrices are zero, as in a new adapter."""
    reaches_vision: bool
    """Whether vision tower or merger are adapted, too."""


def load_adapter_folder(path: Path, model_path: Path) -> AdapterFolder:
    """Inspect an adapter; raises `ConfigError` if there is none, it is damaged, or `model_path` is another model."""
    folder = path.expanduser().absolute()
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    damage = f"no {' and no '.join(missing)}" if missing else find_damage(folder)
    if damage is not None:
        raise ConfigError(
            f"adapter: expected a folder with a LoRA adapter, such as sampler_weights/<step> of a run, got "
            f"{str(path)!r} ({damage}); look into the checkpoints.jsonl of that run"
        )
    with boundary(ConfigError, f"adapter: {str(folder)!r} cannot be read"):
        settings: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank = int(settings["r"])
        data = (folder / ADAPTER_WEIGHTS).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, dict[str, Any]] = json.loads(data[8:start])
        header.pop("__metadata__", None)
        spans = [entry["data_offsets"] for name, entry in header.items() if "lora_B" in name]
        changes_model = any(data[start + low : start + high].strip(b"\0") for low, high in spans)
    # the language model's width and depth must be those of the adapter's tensors
    model_settings: dict[str, Any] = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = model_settings.get("text_config", model_settings)
    layers = [int(found[1]) for name in header if (found := re.search(r"language_model\.layers\.(\d+)\.", name))]
    widths = {entry["shape"][1] for name, entry in header.items() if re.search(r"q_proj\.lora_A", name)}
    depth, width = max(layers, default=-1) + 1, int(text.get("hidden_size", 0))
    if depth > int(text.get("num_hidden_layers", depth)) or (widths and widths != {width}):
        raise ConfigError(
            f"adapter: expected one for {model_path.name} (hidden size {width}, {text.get('num_hidden_layers')} "
            f"layers), got {str(folder)!r} for hidden size {sorted(widths)} and {depth} layers; name the model that it "
            "was trained on"
        )
    return AdapterFolder(
        path=folder,
        rank=rank,
        policy_version=int(folder.name) if folder.name.isdecimal() else 0,
        changes_model=changes_model,
        reaches_vision=any(".visual." in name for name in header),
    )
