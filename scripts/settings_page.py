"""Every setting of every recipe with its default, as docs/settings.md: `python -m scripts.settings_page`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from cua_rl.command_line.recipe import run_recipe
from cua_rl.command_line.settings import NO_PRESETS, REQUIRED, Setting, ShownPresets, list_settings
from cua_rl.command_line.values import as_argument, type_name
from cua_rl.planning.plan_config import PlanConfig
from cua_rl.recipes.ask_checkpoints import AskConfig
from cua_rl.recipes.calibrate_judge import CalibrateConfig
from cua_rl.recipes.doctor import DoctorConfig
from cua_rl.recipes.export_model import ExportModelConfig
from cua_rl.recipes.export_rollout import ExportConfig
from cua_rl.recipes.export_trajectories import ExportTrajectoriesConfig
from cua_rl.recipes.import_trajectories import ImportTrajectoriesConfig
from cua_rl.recipes.new_environment import NewEnvironmentConfig
from cua_rl.recipes.prune import PruneConfig
from cua_rl.recipes.rebuild_datums import RebuildConfig
from cua_rl.recipes.recover import RecoverConfig
from cua_rl.recipes.replay_step import ReplayConfig
from cua_rl.recipes.serve_monitor import MonitorConfig
from cua_rl.recipes.serve_tinker import ServeTinkerConfig
from cua_rl.recipes.take_over import TakeOverConfig
from cua_rl.run.evaluation_config import EVALUATE_PRESETS, EvaluateConfig
from cua_rl.run.model_servers import SERVE_PRESETS, ServeModelConfig
from cua_rl.run.rollout_config import RolloutConfig
from cua_rl.run.sft_config import SFT_PRESETS, SftConfig
from cua_rl.run.suite import SuiteConfig
from cua_rl.run.training_config import TRAIN_PRESETS, CLIConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe on the page."""

    module: str
    config_class: type[Any]
    presets: ShownPresets = field(default_factory=lambda: NO_PRESETS)


RECIPES = (
    Recipe(module="train", config_class=CLIConfig, presets=TRAIN_PRESETS),
    Recipe(module="evaluate", config_class=EvaluateConfig, presets=EVALUATE_PRESETS),
    Recipe(module="suite", config_class=SuiteConfig),
    Recipe(module="sft", config_class=SftConfig, presets=SFT_PRESETS),
    Recipe(module="doctor", config_class=DoctorConfig),
    Recipe(module="plan", config_class=PlanConfig),
    Recipe(module="calibrate_judge", config_class=CalibrateConfig),
    Recipe(module="serve_model", config_class=ServeModelConfig, presets=SERVE_PRESETS),
    Recipe(module="serve_tinker", config_class=ServeTinkerConfig),
    Recipe(module="serve_monitor", config_class=MonitorConfig),
    Recipe(module="export_model", config_class=ExportModelConfig),
    Recipe(module="export_rollout", config_class=ExportConfig),
    Recipe(module="export_trajectories", config_class=ExportTrajectoriesConfig),
    Recipe(module="import_trajectories", config_class=ImportTrajectoriesConfig),
    Recipe(module="new_environment", config_class=NewEnvironmentConfig),
    Recipe(module="rebuild_datums", config_class=RebuildConfig),
    Recipe(module="replay_step", config_class=ReplayConfig),
    Recipe(module="ask_checkpoints", config_class=AskConfig),
    Recipe(module="take_over", config_class=TakeOverConfig),
    Recipe(module="recover", config_class=RecoverConfig),
    Recipe(module="prune", config_class=PruneConfig),
)

_INTRODUCTION = """\
# Settings

This page lists every setting of every recipe with its default (`python -m scripts.settings_page` generates it).
`key=value`, `--key value` and `--key=value` are equivalent; `--config file.yaml` reads settings from a file, and the
command line overrides it. Lists can be written as `a,b`; dictionaries are JSON, or are set entry by entry
(`tasks.limit=3`).

A setting in a group has three names: `loss.clip_low`, the same with an underscore (`loss_clip_low`), and only its last
part, if no other group has it (`clip_low`). In Python, groups are objects:
`CLIConfig(loss=LossConfig(clip_low=0.5))`. `--help` shows the settings that most people need, `--help loss` a
group, `--help all` everything. Set API keys and tokens in the environment or in `.env` (`env.example`),
or name a private file: `--gbox_api_key_file PATH` reads `gbox_api_key`. Every user of a machine can read
command-line arguments.
"""


@chz.chz
class SettingsPageConfig:
    """Write the page of settings."""

    output_path: Path = chz.field(default=PAGE, doc="file to write")


def format_page() -> str:
    """The whole page as Markdown."""
    shared, trained = list_settings(RolloutConfig), list_settings(CLIConfig)
    sections = [_INTRODUCTION]
    for recipe in RECIPES:
        is_shared = issubclass(recipe.config_class, RolloutConfig)
        takes_all = recipe.config_class in (DoctorConfig, PlanConfig)
        inherited = trained if takes_all else shared if is_shared else ()
        own = [setting for setting in list_settings(recipe.config_class) if setting not in inherited]
        lines: list[str] = []
        for condition, values in recipe.presets.items():
            shown = ", ".join(_code(f"{name}={shown_default(value)}") for name, value in values.items())
            lines.append(f"\n{condition}: {shown}.")
        sections += [f"\n## `python -m cua_rl.recipes.{recipe.module}`\n", *_rows(own), *lines]
        if takes_all:
            sections.append("\nAlso those of `train`.\n")
        elif is_shared:
            sections.append(
                "\nAlso those of [agents, devices and the model server](#agents-devices-and-the-model-server).\n"
            )
    sections += ["\n## Agents, devices and the model server\n", "Shared by training and evaluation.\n", *_rows(shared)]
    return "\n".join(sections).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _rows(settings: Sequence[Setting]) -> list[str]:
    """A table, those in groups after all others."""
    rows = ["| setting | default | kind | meaning |", "|---|---|---|---|"]
    for setting in sorted(settings, key=lambda setting: "." in setting.name):
        if setting.group is None:
            default = "required" if setting.default is REQUIRED else _code(shown_default(setting.default))
            cells = (_code(setting.name), default, _cell(type_name(setting.kind)), _cell(setting.doc))
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def shown_default(value: object) -> str:
    """A default that is the same on every machine: files of the package are relative to it."""
    root = PAGE.parents[1]
    if isinstance(value, Path | str) and Path(value).is_relative_to(root):
        return as_argument(Path(value).relative_to(root))
    return as_argument(value)


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
