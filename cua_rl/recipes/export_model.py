"""Write a trained model as a folder that Transformers and vLLM load:
`python -m cua_rl.recipes.export_model run=runs/demo out=my-agent`.

The default is the whole model, with the adapter merged into the base model's weights; `kind=adapter` writes the LoRA
adapter alone. A model card says what it was trained on and how often it succeeds.
"""

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.checkpoints import ADAPTER_CONFIG, find_damage, load_adapter_folder
from cua_rl.run_folder.log_directory import load_settings
from cua_rl.run_folder.model_card import ExportKind, format_model_card
from cua_rl.run_folder.model_folder import fetch_weights, find_model, pinned_name, repository_of
from cua_rl.training.folders import ADAPTER_WEIGHTS
from cua_rl.types.errors import ConfigError, boundary

_MUCH_LOST = 0.1
"""Share of an update lost by rounding above which the recipe recommends float32."""


@chz.chz
class ExportModelConfig:
    """Write a trained model as a Hugging Face folder."""

    run: Path = chz.field(doc="folder of a run of recipes.train or recipes.sft")
    out: Path = chz.field(doc="folder to write; must not exist")
    step: int | None = setting(None, "checkpoint to export, by its step; None is the newest")
    kind: ExportKind = setting(
        "merged", "merged: the whole model, with the adapter merged into the weights; adapter: the LoRA adapter alone"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "merged: precision of the written weights; auto is the base model's"
    )
    model_name: str | None = setting(None, "base model, a folder or hub id, if it is not where the run found it")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The checkpoint to export."""

    settings: Mapping[str, Any]
    """The run's config.json."""
    step: int
    weights: Path
    """The adapter's folder, or that of a whole model."""
    base: Path
    """The folder of the base model, `weights` itself if the run trained everything."""
    hub_base: str | None

    @property
    def adapter(self) -> Path | None:
        return None if self.weights == self.base else self.weights


async def cli_main(config: ExportModelConfig) -> None:
    """Find the checkpoint and its base model, and write the folder."""
    if config.out.exists():
        raise ConfigError(f"out: expected a folder that does not exist, got {str(config.out)!r}; choose another")
    source = find_source(config)
    if config.kind == "adapter" and source.adapter is None:
        raise ConfigError("kind: expected merged for a run that trained all weights, got adapter; leave kind out")
    with boundary(ConfigError, f"out: expected a folder that can be made, got {str(config.out)!r}; choose another"):
        await asyncio.to_thread(config.out.absolute().parent.mkdir, parents=True, exist_ok=True)
    rounding = await asyncio.to_thread(_write, config, source)
    print(f"{config.kind} model of step {source.step} in {config.out}")
    if rounding > _MUCH_LOST:
        print(
            f"warning: in the stored precision, rounding changes the update by {100 * rounding:.0f} % of its norm; "
            "dtype=float32 keeps it, and so does kind=adapter"
        )


def find_source(config: ExportModelConfig) -> _Source:
    """The checkpoint that the configuration names; raises `ConfigError` if it, or its base model, is missing."""
    config_path, checkpoints_path = config.run / "config.json", config.run / "checkpoints.jsonl"
    if not (config_path.is_file() and checkpoints_path.is_file()):
        raise ConfigError(
            f"run: expected the folder of a run with a checkpoint, got {str(config.run)!r} without config.json or "
            "checkpoints.jsonl; name the folder that the run printed"
        )
    settings = load_settings(config.run, "run")
    weights = {int(str(one["step"])): config.run / str(one["sampler_path"]) for one in read_records(checkpoints_path)}
    step = max(weights, default=0) if config.step is None else config.step
    if step not in weights:
        raise ConfigError(f"step: expected one of the checkpoints {sorted(weights)}, got {config.step}; choose one")
    damage = find_damage(weights[step])
    if damage is not None:
        raise ConfigError(f"step: expected complete weights, got {damage}; choose another of {sorted(weights)}")
    folder = weights[step].absolute()
    if not (folder / ADAPTER_CONFIG).is_file():
        return _Source(settings=settings, step=step, weights=folder, base=folder, hub_base=None)
    name = config.model_name or settings.get("model_name")
    recorded = Path(str(settings["model_path"]))
    base = recorded if config.model_name is None and recorded.is_dir() else find_model(name)
    if config.kind == "merged":
        fetch_weights(name, base)
    load_adapter_folder(folder, base)
    is_on_hub = name is not None and not Path(str(name)).expanduser().exists() and str(name).count("/") == 1
    hub_base = pinned_name(str(name), base) if is_on_hub else None
    return _Source(settings=settings, step=step, weights=folder, base=base, hub_base=hub_base)


def _write(config: ExportModelConfig, source: _Source) -> float:
    """Write the folder, complete or not at all; returns the share of the update that rounding changed."""
    # here, because only this recipe's last part needs torch, and refused settings should not wait for it
    from cua_rl.training.checkpoint import write_folder
    from cua_rl.training.model_files import Merged, merge_adapter

    merged = Merged(dtype="", rounding=0.0)

    def write(folder: Path) -> None:
        nonlocal merged
        if config.kind == "adapter":
            shutil.copy2(source.weights / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
            settings = json.loads((source.weights / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            settings["base_model_name_or_path"] = repository_of(source.hub_base or "") or str(source.base)
            settings["revision"] = (source.hub_base or "").partition("@")[2] or None
            (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        else:
            merged = merge_adapter(source.base, source.adapter, folder, config.dtype)
        card = format_model_card(
            source.settings,
            read_records(config.run / "metrics.jsonl"),
            step=source.step,
            kind=config.kind,
            dtype=merged.dtype,
            hub_base=source.hub_base,
            rounding=merged.rounding,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder(config.out.absolute(), write)
    return merged.rounding


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ExportModelConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
