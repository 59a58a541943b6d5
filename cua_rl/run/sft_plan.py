"""Everything about a supervised run that can be known, and refused, before a model loads."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from cua_rl.command_line.plain_config import plain_config
from cua_rl.devices.pool import DeviceBackend
from cua_rl.errors import ConfigError
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.metric_log import require_wandb
from cua_rl.run.checkpoint_damage import find_checkpoint
from cua_rl.run.log_directory import LogDirectory, run_folder
from cua_rl.run.model_folder import find_model, make_image_renderer, max_positions, require_trainable
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.sft_data import OpenedData, open_data
from cua_rl.run.site import require_own_model

EXPERT_STEPS = 100
_FIXED = ("data_sha256", "model_path", "lora_rank", "lora_alpha", "seed", "batch_size", "num_eval_conversations")
"""What a resumed run must share with its beginning, or its loss curve would mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """A configuration whose every reference has been looked up, data included."""

    config: SftConfig
    run_name: str
    log_path: Path
    model_path: Path
    renderer: Renderer
    data: OpenedData
    max_steps: int
    checkpoint_path: Path | None

    def effective(self) -> dict[str, object]:
        """What the run will really use, for people, for the dry run and for a resume."""
        return {
            "run_name": self.run_name,
            "log_path": str(self.log_path),
            "model_path": str(self.model_path),
            "renderer": self.renderer.name,
            "data_description": self.data.description,
            "data_sha256": self.data.sha256,
            "num_train_conversations": self.data.dataset.num_examples,
            "num_held_out_conversations": self.data.num_held_out,
            "num_steps": self.max_steps,
        }


async def plan_sft(config: SftConfig, devices: DeviceBackend, environ: Mapping[str, str] = os.environ) -> SftPlan:
    """Check the configuration against the world; raises `ConfigError` for the first thing that cannot work.

    `devices` are where experts work; they stay open as long as the plan is used.
    """
    require_wandb(config.wandb_project)
    if config.data == "experts":
        require_own_model(config, config.model_name)
    model_path = find_model(config.model_name)
    renderer = make_image_renderer(model_path, config.renderer_name)
    require_trainable(model_path)
    checkpoint_path = find_checkpoint(
        config.load_checkpoint_path, lora_rank=config.lora_rank, lora_alpha=config.lora_alpha
    )
    max_tokens = _max_tokens(config, model_path)
    database_url = _database_url(config, environ)
    data = await open_data(config, renderer, devices, max_tokens=max_tokens, database_url=database_url)
    num_examples = data.dataset.num_examples
    pass_steps = EXPERT_STEPS if num_examples is None else ceil(num_examples / config.batch_size)
    max_steps = pass_steps if config.max_steps is None else config.max_steps
    if config.warmup_steps >= max_steps:
        raise ConfigError(
            f"warmup_steps: expected fewer than the {max_steps} steps of the run, got {config.warmup_steps}; lower it"
        )
    return SftPlan(
        config=config,
        run_name=run_name(config),
        log_path=log_path(config),
        model_path=model_path,
        renderer=renderer,
        data=data,
        max_steps=max_steps,
        checkpoint_path=checkpoint_path,
    )


def run_name(config: SftConfig) -> str:
    """The same settings give the same name, so that the same command can resume."""
    if config.log_path is not None:
        return Path(config.log_path).name
    model = "tiny" if config.model_name is None else Path(config.model_name).name
    weights = f"r{config.lora_rank}" if config.lora_rank else "full"
    data = f"{config.data}-{Path(config.from_run).name}" if config.from_run else Path(config.data).stem
    return f"sft-{model}-{data}-{weights}-b{config.batch_size}-lr{config.learning_rate:g}-seed{config.seed}"


def log_path(config: SftConfig) -> Path:
    """Where the run writes."""
    return run_folder(config.log_path, config.log_dir, run_name(config))


def require_same_run(plan: SftPlan, folder: LogDirectory) -> None:
    """Raises `ConfigError` if the run in `folder` began with other data or settings that its batches depend on."""
    if not folder.config_path.is_file():
        return
    before: dict[str, Any] = json.loads(folder.config_path.read_text(encoding="utf-8"))
    now = plain_config(plan.config) | plan.effective()
    for name in _FIXED:
        if before.get(name) != now[name]:
            raise ConfigError(
                f"{name}: expected {before.get(name)!r} as when the run in {str(folder.path)!r} began, got "
                f"{now[name]!r}; go on with the same, or choose another log_path"
            )


def _database_url(config: SftConfig, environ: Mapping[str, str]) -> str | None:
    if config.data != "rollouts":
        return None
    from cua_rl.database.session import database_url

    return database_url(environ)


def _max_tokens(config: SftConfig, model_path: Path) -> int:
    longest = max_positions(model_path)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the positions of {model_path.name}, got "
            f"{config.max_model_len}; leave max_model_len out"
        )
    return config.max_model_len or longest
