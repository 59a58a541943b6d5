"""Training configuration, and the presets of the embedded demo."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast

import chz

from cua_rl.command_line.fields import Given, setting, with_presets
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.environments.contract import PAID_DEVICES
from cua_rl.machine.presets import EMBEDDED_DEMO, MACHINE_PRESETS, PresetName
from cua_rl.rl.config import LoopConfig
from cua_rl.run.rollout_config import (
    ROLLOUT_SECTIONS,
    RolloutConfig,
    Tasks,
    device_presets,
    given_environment,
)
from cua_rl.training.config import LossName

LOSS_CLIPS: Mapping[LossName, Given] = {
    "gspo": {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    "cispo": {"loss.clip_low": 1.0, "loss.clip_high": 4.0},
    "dppo": {"loss.clip_low": 0.15, "loss.clip_high": 0.15},
}
"""Of papers: a turn's ratio moves far less than a token's (arXiv 2507.18071), and CISPO bounds the weight only from
above (arXiv 2506.13585), at 5 (arXiv 2510.13786); DPPO's limits are on probabilities (arXiv 2602.04879)."""


def train_presets(given: Given) -> Given:
    """Defaults that depend on given settings: the machine, the demo if no model is given, tasks of the same source."""
    name = given.get("preset")
    chosen: Given = MACHINE_PRESETS[cast("PresetName", name)].settings if name in MACHINE_PRESETS else {}
    if given.get("base_url") is not None:  # its server has been started already
        chosen = {name: value for name, value in chosen.items() if name != "server.tensor_parallel"}
    tasks, environment = given.get("tasks"), given_environment(given.get("tasks"))
    given = MappingProxyType({**chosen, **given})
    demo = EMBEDDED_DEMO if given.get("model_name") is None else {}
    held_out = {} if environment is None else {"eval_tasks": tasks if environment.has_held_out else None}
    clips = LOSS_CLIPS.get(cast("LossName", given.get("loss.name")), {})
    return {**chosen, **demo, **clips, **held_out, **device_presets(given)}


@chz.chz
class MonitorSettings:
    """The run's own Training Monitor, and a remote one to which the run is sent."""

    show: bool = setting(True, "start a Training Monitor for the run on the loopback address", for_group=True)
    port: int | None = setting(None, "port of the run's own monitor; None is 8720, or a free one", within=(0, 65535))
    base_url: str | None = setting(None, "address of a remote monitor to which the run is sent; also MONITOR_BASE_URL")
    project_id: str | None = setting(None, "project on the remote monitor, for links; also PROJECT_ID")
    project_token: str | None = setting(
        None,
        "token of the remote project, never stored; set MONITOR_PROJECT_TOKEN or project_token_file=PATH",
    )


@with_presets(train_presets, explain_field, accept_value)
@chz.chz
class CLIConfig(LoopConfig, RolloutConfig):
    """Train a vision computer-use agent with group-relative policy gradients."""

    preset: PresetName | None = setting(
        None,
        "model, context and screens for a machine (docs/gpus.md), or for all demo tasks (ladder, docs/learning.md)",
    )
    training: Literal["local", "tinker"] = setting(
        "local",
        "where the model trains and samples: local: on this machine, or on your own servers and nodes; tinker: on the "
        "Tinker service at base_url or TINKER_BASE_URL (docs/more_machines.md)",
    )
    tinker_api_key: str | None = setting(
        None,
        "training=tinker: key of the service, never stored; set TINKER_API_KEY in the environment, or "
        "tinker_api_key_file=PATH",
    )

    eval_tasks: Tasks | None = setting(
        doc="source of held-out tasks; None disables evaluation",
        factory=lambda: {"source_type": "demo_eval"},
    )

    trace: bool = setting(
        False,
        "write each rollout to trace/ in the run's folder: screenshots with the actions drawn on them, and the text",
    )
    rollout_workers: int = setting(
        0,
        "processes that operate devices and agents, on the Ray cluster at RAY_ADDRESS or on this machine, each with a "
        "share of max_concurrent_rollouts; 0: the run itself does so (docs/more_machines.md)",
        at_least=0,
    )

    monitor: MonitorSettings = chz.field(default_factory=MonitorSettings)

    @property
    def vllm_url(self) -> str | None:
        """`base_url`, if it is of vLLM servers, not of a Tinker service."""
        return None if self.training == "tinker" else self.base_url

    @chz.validate
    def _groups_can_be_compared(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size: expected at least 2, because advantages compare the rollouts of a group, got "
                f"{self.group_size!r}; set group_size=2 or more"
            )
        if self.sampling.min_group_size > self.group_size:
            raise ValueError(
                f"sampling.min_group_size: expected at most group_size={self.group_size}, got "
                f"{self.sampling.min_group_size!r}; lower it"
            )

    @chz.validate
    def _an_adapter_learns_from_rewards(self) -> None:
        if not self.lora_rank:
            raise ValueError(f"lora_rank: expected at least 1, got {self.lora_rank!r}; set lora_rank=1 or more")
        if self.loss.name == "cross_entropy":
            raise ValueError(
                "loss: expected a policy loss, got 'cross_entropy', which only imitates; choose another, or run "
                "python -m cua_rl.recipes.sft"
            )


TRAIN_SECTIONS = {
    "Model": ("preset", "model_name", "lora_rank", "load_checkpoint_path", "base_url"),
    "Tasks": ("tasks", "eval_tasks", "reward", "seed"),
    **ROLLOUT_SECTIONS,
    "Training": (
        *("max_steps", "group_size", "groups_per_batch", "max_concurrent_rollouts", "temperature"),
        *("learning_rate", "learning_rate_schedule", "loss", "advantages", "kl_penalty_coef", "num_substeps"),
        "max_steps_off_policy",
    ),
    "Run": (
        *("log_path", "behavior_if_log_dir_exists", "eval_every", "save_every", "wandb_project", "trace", "monitor"),
        "dry_run",
    ),
}
"""What `--help` shows; `--help all` shows every setting."""

TRAIN_PRESETS = {
    "Without model_name, the embedded demo presets": EMBEDDED_DEMO,
    **{f"With loss={name}": dict(clips) for name, clips in LOSS_CLIPS.items()},
    **{f"With preset={name}": dict(preset.settings) for name, preset in MACHINE_PRESETS.items()},
    "With GBox boxes or a gym": PAID_DEVICES,
    "With box_type=linux": {"device": "gbox"},
}
"""What replaces defaults, for `--help` and docs/settings.md."""
