"""Evaluation configuration, and the presets of the tiny model."""

from typing import Literal, cast

import chz

from cua_rl.command_line.settings import explain_field
from cua_rl.run.rollout_config import PAID_DEVICES, ROLLOUT_SECTIONS, RolloutConfig, Tasks, device_presets
from cua_rl.settings import Given, at_least, with_presets

Models = list[dict[str, object]]

TINY_MODEL: dict[str, object] = {"temperature": 0.5, "max_tokens": 48, "server.max_model_len": 2048}
"""Settings for the tiny model, used if no other model is given."""


def evaluate_presets(given: Given) -> Given:
    """The tiny model's settings, unless the configuration or one of its entries names another model."""
    models = cast("Models", given.get("models") or [])
    names_model = given.get("model_name") is not None or any({"model_name", "base_url"} & set(item) for item in models)
    return {**({} if names_model else TINY_MODEL), **device_presets(given)}


@with_presets(evaluate_presets, explain_field)
@chz.chz
class EvaluateConfig(RolloutConfig):
    """Measure one or several models on the same task instances."""

    # Models
    models: Models = chz.field(
        default_factory=lambda: [{"name": "base"}],
        doc="models to compare; the others are tested against the first: a name each, and model_name and "
        "adapter, or base_url, model, api, api_key_env and extra",
    )
    model_name: str | None = chz.field(
        default=None,
        doc="folder or hub id of the Qwen3-VL model for entries that name none; None uses the included tiny model",
    )
    base_url: str | None = chz.field(
        default=None,
        doc="URL of a running vLLM server (with runtime LoRA updating) for local models and adapters; None starts one",
    )

    # Tasks
    tasks: Tasks = chz.field(
        default_factory=lambda: {"source_type": "demo_eval"}, doc="source of tasks (TaskSourceConfig)"
    )
    num_tasks: int = chz.field(
        default=64, doc="number of task instances, the same for every model", metadata=at_least(1)
    )
    num_attempts: int = chz.field(
        default=1, doc="attempts of each model at each task instance, for pass@k", metadata=at_least(1)
    )
    seed: int = chz.field(
        default=0,
        doc="seed of the task instances; the same seed as a training run gives its held-out tasks",
        metadata=at_least(0),
    )

    # Attempts
    temperature: float = chz.field(default=0.0, doc="sampling temperature, 0 for greedy", metadata=at_least(0.0))
    reward: str = chz.field(
        default="binary",
        doc="reward function for the reported mean reward: binary, score, completion, efficiency, shaped, "
        "comprehensive, judge, or module:function",
    )
    max_concurrent_rollouts: int = chz.field(
        default=64, doc="maximum concurrent attempts; 8 with GBox and gyms", metadata=at_least(1)
    )

    # Results
    log_path: str | None = chz.field(default=None, doc="folder of the results; None is runs/evaluate-<names>")
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = chz.field(
        default="ask", doc="what to do if the folder already holds an evaluation; resume runs what is missing"
    )
    dry_run: bool = chz.field(
        default=False, doc="check everything, print the effective configuration as JSON, and exit"
    )


EVALUATE_SECTIONS = {
    "Models": ("models", "model_name", "base_url"),
    "Tasks": ("tasks", "num_tasks", "num_attempts", "seed", "reward", "temperature", "max_concurrent_rollouts"),
    **ROLLOUT_SECTIONS,
    "Results": ("log_path", "behavior_if_log_dir_exists", "dry_run"),
}
"""What `--help` shows; `--help all` shows every setting."""

EVALUATE_PRESETS = {
    "With the tiny model only, the recipe presets": TINY_MODEL,
    "With GBox boxes or a gym": PAID_DEVICES,
    "With box_type=linux": {"device": "gbox"},
}
"""What replaces defaults, for `--help` and docs/settings.md."""
