"""Configuration of supervised fine-tuning, and the presets of the tiny model."""

from pathlib import Path

import chz

from cua_rl.command_line.fields import Given, check_numbers, setting, with_presets
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.run.rollout_config import RunConfig
from cua_rl.training.config import LearningConfig

MAX_LORA_RANK = 512  # what vLLM accepts


TINY_MODEL: dict[str, object] = {"lora_rank": 16, "learning_rate": 2e-3}
"""Settings for the tiny model, used if no model is given; its adapters fit the embedded demo."""

IMITATION: dict[str, object] = {
    "learning_rate": 1e-4,
    "learning_rate_schedule": "linear",
    "eval_every": 20,
    "save_every": 50,
    "checkpoints.keep_checkpoints": 0,
    "trainer.dtype": "float32",
}
"""Settings of every supervised run: there is no sampler whose precision to match, and no policy that may collapse."""


def sft_presets(given: Given) -> Given:
    """The settings of imitation, and the tiny model's, if no model is given."""
    return IMITATION | (TINY_MODEL if given.get("model_name") is None else {})


@with_presets(sft_presets, explain_field, accept_value)
@chz.chz
class SftConfig(LearningConfig, RunConfig):
    """Fine-tune a vision computer-use agent on conversations: the cold start before reinforcement learning."""

    data: str = setting(
        "experts",
        "experts: demonstrations of scripted experts; rollouts: recorded successes of a run; or a .jsonl "
        "file of conversations",
    )
    error_rate: float = setting(
        0.0, "experts: probability per turn that the expert acts on a random element", at_least=0.0
    )
    screen_scale: int = setting(
        1, "experts: scale factor of the simulated 192x320 pixel screen, 1 to 16", within=(0, 16)
    )
    browser_scale: float | None = setting(
        None, "experts: scale factor of web-page screenshots; None uses the task set's default", within=(0.0, 4.0)
    )
    from_run: str | None = setting(
        None, "rollouts: folder of a run with its own database, or name of a run in DATABASE_URL"
    )
    run_steps: int | None = setting(
        None, "rollouts: number of the run's first steps whose rollouts are used; None uses all", at_least=1
    )
    max_per_task: int | None = setting(
        None, "rollouts: maximum rollouts per task template, chosen by seed; None uses all", at_least=1
    )
    num_eval_conversations: int = setting(32, "conversations held out to measure the loss; 0 for none", at_least=0)
    num_eval_actions: int = setting(
        0,
        "maximum number of held-out turns that a model server beside the trainer answers greedily, for comparison "
        "with the recorded actions; 0 for none",
        at_least=0,
    )
    max_steps: int | None = setting(
        None, "training steps; None is one pass over the data, or 100 steps after experts", at_least=1
    )
    batch_size: int = setting(16, "conversations per step", at_least=1)
    max_model_len: int | None = setting(
        None, "maximum tokens of a conversation; None is the model's limit", at_least=64
    )
    max_pixels: int | None = setting(
        None,
        "maximum pixels of a screenshot as the model sees it: server.max_pixels of the recorded run, or of the run "
        "that follows; None is the model's limit",
        at_least=4096,
    )

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)
        if self.lora_rank > MAX_LORA_RANK:
            raise ValueError(f"lora_rank: expected at most {MAX_LORA_RANK}, got {self.lora_rank!r}; lower it")
        if self.checkpoints.resume_with == "changes":
            raise ValueError("checkpoints.resume_with: expected 'same': data and batches of a run stay, got 'changes'")
        if self.num_eval_actions and not (self.lora_rank and self.num_eval_conversations):
            raise ValueError(
                "num_eval_actions: expected an adapter (lora_rank), which a model server loads, and held-out steps "
                f"(num_eval_conversations), got {self.lora_rank} and {self.num_eval_conversations}; leave it out"
            )
        if self.error_rate > 1:
            raise ValueError(f"error_rate: expected a share of turns, 0 to 1, got {self.error_rate!r}; lower it")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"warmup_steps: expected fewer than max_steps={self.max_steps}, got {self.warmup_steps!r}; lower it"
            )

    @chz.validate
    def _settings_fit_the_data(self) -> None:
        if self.data not in ("experts", "rollouts") and Path(self.data).suffix != ".jsonl":
            raise ValueError(
                f"data: expected experts, rollouts or a file that ends in .jsonl, got {self.data!r}; correct data"
            )
        if self.data == "rollouts" and self.from_run is None:
            raise ValueError("from_run: expected a run with data=rollouts, got none; add from_run=<folder or run name>")
        for kind, names in _ONLY_WITH.items():
            for name, unset in names.items():
                if self.data != kind and getattr(self, name) != unset:
                    raise ValueError(
                        f"{name}: expected it only with data={kind}, got it with data={self.data}; leave {name} out"
                    )


_ONLY_WITH: dict[str, dict[str, object]] = {
    "experts": {
        "tasks": {"source_type": "demo_training"},
        "error_rate": 0.0,
        "screen_scale": 1,
        "browser_scale": None,
        "max_turns": 20,
    },
    "rollouts": {"from_run": None, "run_steps": None, "max_per_task": None},
}

SFT_SECTIONS = {
    "Model": ("model_name", "lora_rank", "load_checkpoint_path"),
    "Data": ("data", "tasks", "error_rate", "max_turns", "from_run", "run_steps", "max_per_task"),
    "Training": (
        *("seed", "max_steps", "batch_size", "learning_rate", "learning_rate_schedule", "warmup_steps"),
        *("num_eval_conversations", "num_eval_actions", "max_model_len"),
    ),
    "Run": ("log_path", "behavior_if_log_dir_exists", "eval_every", "save_every", "wandb_project", "dry_run"),
}
"""What `--help` shows; `--help all` shows every setting."""

SFT_PRESETS = {"In every run": IMITATION, "Without model_name, the tiny model presets": TINY_MODEL}
"""What replaces defaults, for `--help` and docs/settings.md."""
