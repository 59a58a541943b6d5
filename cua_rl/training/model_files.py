# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Model folders as files: the files beside the weights, and weights with a LoRA adapter merged into them."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cua_rl.training.folders import ADAPTER_WEIGHTS
from cua_rl.types.errors import ConfigError

ADAPTER_CONFIG_FILE = "adapter_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX_FILE = "model.safetensors.index.json"
Dtype = Literal["auto", "float32", "bfloat16"]
_OTHER_LORA = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""Settings of peft that change what an adapter computes; the trainer leaves them off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """How a merged model is stored."""

    dtype: str
    """The precision of most weights."""
    rounding: float
    """Norm of the merged weights' rounding errors as a share of the update's norm: at 0.1, a tenth of what was learned
    is lost in the stored precision.
    """


def copy_settings(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer and preprocessor files that `folder` does not have; not the weights."""
    for file in source.iterdir():
        is_weights = file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
        if file.is_file() and not is_weights and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)


def merge_adapter(base: Path, adapter: Path | None, folder: Path, dtype: Dtype) -> Merged:
    """Write the model in `base` with the adapter's update added to its weights, into an existing folder.

    Sums are taken in float32 and stored as `dtype`; auto is the precision of `base`. Only one weight file is in memory
    at a time. Tensors keep the names that they have in `base`, so that whatever loads `base` loads the copy.

    Raises:
        ConfigError: the base model is quantized or not stored as safetensors, or the adapter is not a plain LoRA
            adapter for it.
    """
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ConfigError(
            f"expected a base model in full or half precision, got the quantized {str(base)!r}; export the adapter "
            "alone, with kind=adapter"
        )
    updates = {} if adapter is None else _load_updates(adapter)
    unused, lost, learned, num_bytes = set(updates), 0.0, 0.0, Counter[torch.dtype]()
    for file in _weight_files(base):
        merged: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118 - not a mapping
                weight: Tensor = source.get_tensor(name)
                is_converted = dtype != "auto" and weight.is_floating_point()
                stored: torch.dtype = getattr(torch, dtype) if is_converted else weight.dtype
                key = _layer_name(name.removesuffix(".weight"))
                if name.endswith(".weight") and key in updates:
                    unused.discard(key)
                    change = updates[key]()
                    exact = weight.float() + change
                    merged[name] = exact.to(stored)
                    lost += float((merged[name].float() - exact).square().sum())
                    learned += float(change.square().sum())
                else:
                    merged[name] = weight.to(stored)
        for tensor in merged.values():
            num_bytes[tensor.dtype] += tensor.nbytes
        save_file(merged, folder / file.name, metadata={"format": "pt"})
    if unused:
        raise ConfigError(
            f"expected an adapter for the model in {str(base)!r}, got one with {sorted(unused)[0]!r}, which the model "
            "does not have; name the model that it was trained on"
        )
    _write_configs(base, folder, config, dtype, num_bytes.total())
    ((most, _),) = num_bytes.most_common(1)
    return Merged(dtype=str(most).removeprefix("torch."), rounding=(lost / learned) ** 0.5 if learned else 0.0)


def _load_updates(adapter: Path) -> dict[str, Callable[[], Tensor]]:
    """What an adapter adds to weights in float32, by the name of their layer; each computed when it is asked for."""
    settings: dict[str, Any] = json.loads((adapter / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    unknown = [name for name in _OTHER_LORA if settings.get(name)]
    if unknown or settings.get("bias", "none") != "none":
        raise ConfigError(
            f"expected a plain LoRA adapter in {str(adapter)!r}, got one with {', '.join(unknown) or 'biases'}; merge "
            "it with peft"
        )
    tensors = {name: tensor.float() for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items()}
    scale = settings["lora_alpha"] / settings["r"]
    updates: dict[str, Callable[[], Tensor]] = {}
    for name, a in tensors.items():
        module, is_a, _ = name.partition(".lora_A.")
        if is_a:
            b = tensors[f"{module}.lora_B.weight"]
            updates[_layer_name(module.removeprefix("base_model.model."))] = lambda a=a, b=b: scale * (b @ a)
    return updates


def _layer_name(name: str) -> str:
    """The part of a module's name that checkpoints of all versions of Transformers agree on: `layers.0.mlp.up_proj`."""
    return name.replace("language_model.", "").removeprefix("model.")


def _weight_files(base: Path) -> list[Path]:
    index = base / _INDEX_FILE
    if index.is_file():
        names: Iterable[str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [base / name for name in sorted(set(names))]
    if (base / "model.safetensors").is_file():
        return [base / "model.safetensors"]
    raise ConfigError(
        f"expected weights as model.safetensors, or several files and {_INDEX_FILE}, in {str(base)!r}, got neither; "
        "save the base model with Transformers' save_pretrained"
    )


def _write_configs(base: Path, folder: Path, config: Mapping[str, Any], dtype: Dtype, total_size: int) -> None:
    """Write the files that depend on the stored precision, then everything else beside the weights."""
    if dtype != "auto":
        stored = json.dumps(_with_dtype(config, dtype), indent=2)
        (folder / "config.json").write_text(stored + "\n", encoding="utf-8")
    if (base / _INDEX_FILE).is_file():
        index: dict[str, Any] = json.loads((base / _INDEX_FILE).read_text(encoding="utf-8"))
        index["metadata"] = {**index.get("metadata", {}), "total_size": total_size}
        (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_settings(base, folder)


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration with another precision, in its groups too."""
    changed = {name: _with_dtype(value, dtype) if isinstance(value, dict) else value for name, value in config.items()}
    return changed | {name: dtype for name in ("dtype", "torch_dtype") if name in config}
