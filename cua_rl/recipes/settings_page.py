"""Every setting of every recipe with its default, as docs/settings.md: `python -m cua_rl.recipes.settings_page`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from cua_rl.command_line.config_file import as_argument
from cua_rl.command_line.parsing import REQUIRED, ShownPresets, list_settings
from cua_rl.command_line.recipe import run_recipe
from cua_rl.command_line.values import type_name
from cua_rl.recipes import evaluate, sft, train
from cua_rl.recipes.calibrate_judge import CalibrateConfig
from cua_rl.recipes.export_rollout import ExportConfig
from cua_rl.recipes.make_tiny_model import TinyModelConfig
from cua_rl.recipes.make_tiny_page_model import TinyPageModelConfig
from cua_rl.recipes.rebuild_datums import RebuildConfig
from cua_rl.recipes.serve_monitor import MonitorConfig
from cua_rl.run.evaluate_config import EvaluateConfig
from cua_rl.run.rollout_config import RolloutConfig
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.train_config import CLIConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a page says of one recipe."""

    module: str
    config_class: type[Any]
    presets: ShownPresets = field(default_factory=dict[str, Mapping[str, object]])


RECIPES = (
    Recipe(module="train", config_class=CLIConfig, presets=train.SHOWN_PRESETS),
    Recipe(module="evaluate", config_class=EvaluateConfig, presets=evaluate.SHOWN_PRESETS),
    Recipe(module="sft", config_class=SftConfig, presets=sft.SHOWN_PRESETS),
    Recipe(module="calibrate_judge", config_class=CalibrateConfig),
    Recipe(module="serve_monitor", config_class=MonitorConfig),
    Recipe(module="export_rollout", config_class=ExportConfig),
    Recipe(module="rebuild_datums", config_class=RebuildConfig),
    Recipe(module="make_tiny_model", config_class=TinyModelConfig),
    Recipe(module="make_tiny_page_model", config_class=TinyPageModelConfig),
)

_INTRODUCTION = """\
# Settings

This page lists every setting of every recipe with its default (`python -m cua_rl.recipes.settings_page` generates it).
`key=value`, `--key value` and `--key=value` are equivalent; `--config file.yaml` reads settings from a file, and the
command line overrides it. Lists can be written as `a,b`; dictionaries are JSON, or are set entry by entry
(`tasks.limit=3`). Set API keys and tokens in the environment or in `.env` (`env.example`).
"""


@chz.chz
class SettingsPageConfig:
    """Write the page of settings."""

    output_path: Path = chz.field(default=PAGE, doc="file to write")


def format_page() -> str:
    """The whole page as Markdown."""
    shared = {setting.name for setting in list_settings(RolloutConfig)}
    sections = [_INTRODUCTION]
    for recipe in RECIPES:
        own = [*_rows(recipe.config_class, shared if issubclass(recipe.config_class, RolloutConfig) else set())]
        sections += [f"\n## `python -m cua_rl.recipes.{recipe.module}`\n", *own, *_preset_rows(recipe.presets)]
        if issubclass(recipe.config_class, RolloutConfig):
            sections.append(
                "\nAlso those of [agents, devices and the model server](#agents-devices-and-the-model-server).\n"
            )
    sections += ["\n## Agents, devices and the model server\n", "Shared by training and evaluation.\n"]
    sections += _rows(RolloutConfig, set())
    return "\n".join(sections).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _rows(config_class: type[Any], left_out: set[str]) -> list[str]:
    rows = ["| setting | default | kind | meaning |", "|---|---|---|---|"]
    for setting in list_settings(config_class):
        if setting.parts is None and setting.name not in left_out:
            default = "required" if setting.default is REQUIRED else _code(shown_default(setting.default))
            cells = (_code(setting.name), default, _cell(type_name(setting.kind)), _cell(setting.doc))
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def shown_default(value: object) -> str:
    """A default as it is everywhere: files of the package by their place in it, not on this machine."""
    root = PAGE.parents[1]
    return as_argument(value.relative_to(root) if isinstance(value, Path) and value.is_relative_to(root) else value)


def _preset_rows(presets: ShownPresets) -> list[str]:
    lines: list[str] = []
    for condition, values in presets.items():
        shown = ", ".join(_code(f"{name}={as_argument(value)}") for name, value in values.items())
        lines.append(f"\n{condition}: {shown}.")
    return lines


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if text else "empty"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


async def cli_main(config: SettingsPageConfig) -> None:
    """Write the page."""
    config.output_path.write_text(format_page(), encoding="utf-8")
    print(f"wrote {config.output_path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    return run_recipe(SettingsPageConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
