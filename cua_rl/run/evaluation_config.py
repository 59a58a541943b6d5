"""Evaluation configuration, and the presets of the tiny model."""

import chz

from cua_rl.command_line.fields import Given, setting, with_presets
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.environments.contract import PAID_DEVICES
from cua_rl.run.rollout_config import ROLLOUT_SECTIONS, RolloutConfig, device_presets
from cua_rl.types.json_values import mapping, sequence

Models = list[dict[str, object]]

TINY_MODEL: dict[str, object] = {"temperature": 0.5, "max_tokens": 48, "server.max_model_len": 2048}
"""Settings for the tiny model, used if no other model is given."""


MEASUREMENT: dict[str, object] = {"tasks": {"source_type": "demo_eval"}, "max_concurrent_rollouts": 64}
"""Settings of every evaluation."""


def evaluate_presets(given: Given) -> Given:
    """The tiny model's settings, unless the configuration or one of its entries names another model."""
    models = [mapping(item) for item in sequence(given.get("models"))]
    names_model = given.get("model_name") is not None or any({"model_name", "base_url"} & set(item) for item in models)
    return {**MEASUREMENT, **({} if names_model else TINY_MODEL), **device_presets(given)}


@with_presets(evaluate_presets, explain_field, accept_value)
@chz.chz
class EvaluateConfig(RolloutConfig):
    """Measure one or several models on the same task instances."""

    # Models
    models: Models = setting(
        doc="models to compare; each is tested against the first one. An entry has a name, and model_name and adapter "
        "(a folder, a run, or run@step), or base_url, model, api, api_key_env and extra",
        factory=lambda: [{"name": "base"}],
    )

    # Tasks
    num_tasks: int = setting(64, "number of task instances, the same for every model", at_least=1)
    num_attempts: int = setting(1, "attempts of each model at each task instance, for pass@k", at_least=1)
    seed: int = setting(
        0, "seed of the task instances; the same seed as a training run gives its held-out tasks", at_least=0
    )

    # Attempts
    temperature: float = setting(0.0, "sampling temperature, 0 for greedy", at_least=0.0)

    @chz.validate
    def _attempts_can_be_made(self) -> None:
        if self.max_concurrent_rollouts < 1:
            raise ValueError(f"max_concurrent_rollouts: expected at least 1, got {self.max_concurrent_rollouts!r}")


EVALUATE_SECTIONS = {
    "Models": ("models", "model_name", "base_url"),
    "Tasks": ("tasks", "num_tasks", "num_attempts", "seed", "reward", "temperature", "max_concurrent_rollouts"),
    **ROLLOUT_SECTIONS,
    "Results": ("log_path", "behavior_if_log_dir_exists", "dry_run"),
}
"""What `--help` shows; `--help all` shows every setting."""

EVALUATE_PRESETS = {
    "In every evaluation": MEASUREMENT,
    "With the tiny model only, the recipe presets": TINY_MODEL,
    "With GBox boxes or a gym": PAID_DEVICES,
    "With box_type=linux": {"device": "gbox"},
}
"""What replaces defaults, for `--help` and docs/settings.md."""
