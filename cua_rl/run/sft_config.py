"""Configuration of supervised fine-tuning, and the presets of the tiny model."""

from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.settings import explain_field
from cua_rl.run.rollout_config import Tasks
from cua_rl.settings import Given, at_least, check_numbers, with_presets
from cua_rl.supervised.learning_rate import RateSchedule

MAX_LORA_RANK = 512  # what vLLM accepts


TINY_MODEL: dict[str, object] = {"lora_rank": 16, "learning_rate": 2e-3}
"""Settings for the tiny model, used if no model is given; its adapters fit the embedded demo."""


def sft_presets(given: Given) -> Given:
    """The tiny model's settings, if no model is given."""
    return TINY_MODEL if given.get("model_name") is None else {}


@with_presets(sft_presets, explain_field)
@chz.chz
class SftConfig:
    """Fine-tune a vision computer-use agent on conversations: the cold start before reinforcement learning."""

    # Model
    model_name: str | None = chz.field(
        default=None, doc="folder or hub id of a dense Qwen3-VL model; None uses the included tiny model"
    )
    lora_rank: int = chz.field(
        default=32, doc="rank of the LoRA adapter; 0 trains all weights of the model", metadata=at_least(0)
    )
    lora_alpha: int = chz.field(
        default=32, doc="LoRA scale: the update is multiplied by lora_alpha / lora_rank", metadata=at_least(1)
    )
    renderer_name: str | None = chz.field(
        default=None,
        doc="renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen3; None detects it from the model",
    )
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )

    # Data
    data: str = chz.field(
        default="experts",
        doc="experts: demonstrations of scripted experts; rollouts: recorded successes of a run; or a .jsonl "
        "file of conversations",
    )
    tasks: Tasks = chz.field(
        default_factory=lambda: {"source_type": "demo_training"},
        doc="experts: source of tasks (TaskSourceConfig)",
    )
    error_rate: float = chz.field(
        default=0.0,
        doc="experts: probability per turn that the expert acts on a random element",
        metadata=at_least(0.0),
    )
    screen_scale: int = chz.field(
        default=1, doc="experts: scale factor of the simulated 192x320 pixel screen", metadata=at_least(1)
    )
    browser_scale: float | None = chz.field(
        default=None, doc="experts: scale factor of web-page screenshots; None uses the task set's default"
    )
    max_turns: int = chz.field(
        default=20, doc="experts: maximum turns of a conversation; a task may allow fewer", metadata=at_least(1)
    )
    from_run: str | None = chz.field(
        default=None, doc="rollouts: folder of a run with its own database, or name of a run in DATABASE_URL"
    )
    run_steps: int | None = chz.field(
        default=None,
        doc="rollouts: use only rollouts of the run's first steps, this many; None uses all",
        metadata=at_least(1),
    )
    max_per_task: int | None = chz.field(
        default=None,
        doc="rollouts: maximum rollouts per task template, chosen by seed; None uses all",
        metadata=at_least(1),
    )
    num_eval_conversations: int = chz.field(
        default=32, doc="conversations held out to measure the loss, 0 for none", metadata=at_least(0)
    )

    # Training
    seed: int = chz.field(
        default=0, doc="seed of order, held-out choice, expert tasks and initial adapter weights", metadata=at_least(0)
    )
    max_steps: int | None = chz.field(
        default=None,
        doc="training steps; None is one pass over the data, or 100 steps after experts",
        metadata=at_least(1),
    )
    batch_size: int = chz.field(default=16, doc="conversations per step", metadata=at_least(1))
    learning_rate: float = chz.field(default=1e-4, doc="peak AdamW learning rate", metadata=at_least(0.0))
    learning_rate_schedule: RateSchedule = chz.field(
        default="linear", doc="after the warm-up: constant, or linear or cosine decay to a tenth at the last step"
    )
    warmup_steps: int = chz.field(default=0, doc="steps of linear learning-rate warm-up", metadata=at_least(0))
    weight_decay: float = chz.field(default=0.0, doc="decoupled weight decay", metadata=at_least(0.0))
    grad_clip_norm: float = chz.field(
        default=1.0, doc="maximum gradient norm, 0 disables clipping", metadata=at_least(0.0)
    )
    max_model_len: int | None = chz.field(
        default=None, doc="maximum tokens of a conversation; None is the model's limit", metadata=at_least(64)
    )
    trainer_dtype: Literal["float32", "bfloat16"] = chz.field(default="float32", doc="precision of the trainer")
    micro_batch_tokens: int = chz.field(default=16384, doc="maximum tokens of one forward pass", metadata=at_least(64))
    gradient_checkpointing: bool = chz.field(default=False, doc="save memory by recomputing activations")
    num_threads: int | None = chz.field(
        default=None, doc="threads of the trainer on CPU; None is one per core", metadata=at_least(1)
    )

    # Logging
    log_path: str | None = chz.field(default=None, doc="folder of the run; None is <log_dir>/<run name>")
    log_dir: str | None = chz.field(default=None, doc="parent folder of run folders; None is ./runs")
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None disables it")
    wandb_name: str | None = chz.field(default=None, doc="Weights & Biases run name; None is the run's name")
    eval_every: int = chz.field(
        default=20,
        doc="steps between measurements of the held-out loss, 0 measures only before and after training",
        metadata=at_least(0),
    )
    save_every: int = chz.field(
        default=50, doc="steps between checkpoints, 0 saves only at the end", metadata=at_least(0)
    )
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = chz.field(
        default="ask", doc="what to do if the run's folder already holds a run"
    )
    dry_run: bool = chz.field(
        default=False, doc="check everything, including the data, print the effective configuration as JSON, and exit"
    )

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)
        if self.lora_rank > MAX_LORA_RANK:
            raise ValueError(f"lora_rank: expected at most {MAX_LORA_RANK}, got {self.lora_rank!r}; lower it")
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
        *("num_eval_conversations", "max_model_len"),
    ),
    "Run": ("log_path", "behavior_if_log_dir_exists", "eval_every", "save_every", "wandb_project", "dry_run"),
}
"""What `--help` shows; `--help all` shows every setting."""

SFT_PRESETS = {"Without model_name, the tiny model presets": TINY_MODEL}
"""What replaces defaults, for `--help` and docs/settings.md."""
