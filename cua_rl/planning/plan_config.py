"""Settings of recipes.plan: those of the training run, the machine and its prices, and what is assumed or recorded."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

import chz

from cua_rl.command_line.fields import Given, setting, with_presets
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.run.training_config import CLIConfig, train_presets
from cua_rl.run_folder.log_directory import load_settings
from cua_rl.types.errors import ConfigError

_RECORDED = (
    *("model_name", "lora_rank", "max_turns", "max_tokens", "group_size", "groups_per_batch"),
    *("max_concurrent_rollouts", "max_steps_off_policy"),
)


@chz.chz
class Assumptions:
    """Durations and lengths; None takes them from the recorded run, or without one the value in brackets."""

    num_turns: float | None = setting(None, "mean turns of a rollout [half of max_turns]", at_least=1)
    start_s: float | None = setting(None, "seconds from the lease of a device to the first turn [5]", at_least=0)
    device_s: float | None = setting(None, "mean seconds for action and screenshot between two turns [2]", at_least=0)
    device_sigma: float | None = setting(
        None,
        "standard deviation of the logarithm of device_s; with 1, one in a thousand takes 13 times the mean [1]",
        at_least=0,
    )
    end_s: float | None = setting(None, "seconds from the last answer to the reward [1]", at_least=0)
    screen_kb: float | None = setting(
        None, "KB of a screenshot, for controller_s; taken from recorded runs [300, as for 1080x2400]", at_least=0
    )
    controller_s: float | None = setting(
        None,
        "processor seconds of the controller per turn [from screen_kb and tokens; on a CPU, part of the others]",
        at_least=0,
    )
    constant_group_frac: float | None = setting(
        None, "share of groups whose rollouts all succeed or all fail, on which nothing is trained [0.3]", at_least=0
    )
    save_s: float | None = setting(None, "seconds that the trainer takes to write the adapter [1]", at_least=0)
    publish_s: float | None = setting(
        None, "seconds until servers have loaded and verified the adapter [3]", at_least=0
    )
    screen_tokens: int | None = setting(
        None, "tokens of a screenshot; None assumes 1080x2400, scaled to server.max_pixels", at_least=1
    )
    text_tokens: int = setting(60, "other prompt tokens that a turn adds", at_least=0)
    sampled_tokens: int = setting(150, "tokens that the model samples in a turn", at_least=1)
    prompt_tokens: int = setting(1500, "system prompt, tools and task", at_least=0)
    trainer_mfu: float = setting(0.35, "share of a GPU's arithmetic that the trainer reaches", within=(0, 1))
    server_mfu: float = setting(0.4, "share of a GPU's arithmetic that the model server reaches", within=(0, 1))
    bandwidth_frac: float = setting(0.6, "share of a GPU's memory bandwidth that the server reaches", within=(0, 1))


def plan_presets(given: Given) -> Given:
    """Defaults of training, and before them the settings of the recorded run."""
    runs = cast("Sequence[str] | None", given.get("from_run"))
    recorded: Given = _recorded_settings(Path(runs[0])) if runs else {}
    return {**train_presets(MappingProxyType({**recorded, **given})), **recorded}


def _recorded_settings(run: Path) -> Given:
    path = run / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"from_run: expected the folder of a run, with its config.json, got {str(run)!r}; name such a folder"
        )
    config = load_settings(run, "from_run")
    try:
        server = {f"server.{name}": config["server"][name] for name in ("max_model_len", "max_pixels")}
        return {name: config[name] for name in _RECORDED} | server
    except KeyError as missing:
        raise ConfigError(
            f"from_run: expected a run of recipes.train of this version, got one without {missing.args[0]!r} in "
            f"{str(path)!r}; name another run"
        ) from None


@with_presets(plan_presets, explain_field, accept_value)
@chz.chz
class PlanConfig(CLIConfig):
    """Predict speed, utilisation and cost of a training run, and what limits it."""

    gpus: str | None = setting(
        None,
        "GPUs of server and trainer together: their number (up to 64) and kind, such as 8xh100: l4, a10g, rtx4090, "
        "l40s, a100, h100, h200 or b200; None uses those of the recorded run",
    )
    from_run: list[str] | None = setting(
        None,
        "folders of recorded runs: settings are taken from the first, speeds and durations from all of them",
    )
    gpu_usd_per_hour: float | None = setting(None, "price of a GPU; None assumes a price by kind", at_least=0)
    device_usd_per_hour: float = setting(0.0, "price of a device", at_least=0)
    plot: Path | None = setting(Path("plan.png"), "file for the plot; None writes none")
    json: Path | None = setting(None, "file for all figures; None writes none")
    assume: Assumptions = chz.field(default_factory=Assumptions)


PLAN_SECTIONS = {
    "Machine and prices": (
        "gpus",
        "max_concurrent_rollouts",
        "rollout_workers",
        "gpu_usd_per_hour",
        "device_usd_per_hour",
    ),
    "Run": (
        *("from_run", "preset", "model_name", "group_size", "groups_per_batch", "max_turns", "max_steps_off_policy"),
        *("plot", "json"),
    ),
}
"""What `--help` shows; `--help assume` shows what is assumed, `--help all` every setting."""
