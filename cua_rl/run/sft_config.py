"""Configuration of supervised fine-tuning, and the presets of the tiny model."""

from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.config import Sharding
from cua_rl.run.rollout_config import Tasks
from cua_rl.settings import Given, check_numbers, setting, with_presets
from cua_rl.supervised.learning_rate import RateSchedule

MAX_LORA_RANK = 512  # what vLLM accepts


TINY_MODEL: dict[str, object] = {"lora_rank": 16, "learning_rate": 2e-3}
"""Settings for the tiny model, used if no model is given; its adapters fit the embedded demo."""


def sft_presets(given: Given) -> Given:
    """The tiny model's settings, if no model is given."""
    return TINY_MODEL if given.get("model_name") is None else {}


@with_presets(sft_presets, explain_field, accept_value)
@chz.chz
class SftConfig:
    """Fine-tune a vision computer-use agent on conversations: the cold start before reinforcement learning."""

    # Model
    model_name: str | None = setting(
        None, "folder or hub id of a Qwen3-VL or Qwen2.5-VL model; None uses the included tiny model"
    )
    lora_rank: int = setting(32, "rank of the LoRA adapter; 0 trains all weights of the model", at_least=0)
    lora_alpha: int = setting(32, "LoRA scale: the update is multiplied by lora_alpha / lora_rank", at_least=1)
    renderer_name: str | None = setting(
        None,
        "renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen2_5_vl, qwen3_5, qwen3; None detects "
        "it from the model",
    )
    load_checkpoint_path: str | None = setting(
        None, "folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )

    # Data
    data: str = setting(
        "experts",
        "experts: demonstrations of scripted experts; rollouts: recorded successes of a run; or a .jsonl "
        "file of conversations",
    )
    tasks: Tasks = setting(
        doc="experts: source of tasks (TaskSourceConfig)", factory=lambda: {"source_type": "demo_training"}
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
    max_turns: int = setting(20, "experts: maximum turns of a conversation; a task may allow fewer", at_least=1)
    from_run: str | None = setting(
        None, "rollouts: folder of a run with its own database, or name of a run in DATABASE_URL"
    )
    run_steps: int | None = setting(
        None, "rollouts: use only rollouts of the run's first steps, this many; None uses all", at_least=1
    )
    max_per_task: int | None = setting(
        None, "rollouts: maximum rollouts per task template, chosen by seed; None uses all", at_least=1
    )
    num_eval_conversations: int = setting(32, "conversations held out to measure the loss, 0 for none", at_least=0)

    # Training
    seed: int = setting(0, "seed of order, held-out choice, expert tasks and initial adapter weights", at_least=0)
    max_steps: int | None = setting(
        None, "training steps; None is one pass over the data, or 100 steps after experts", at_least=1
    )
    batch_size: int = setting(16, "conversations per step", at_least=1)
    learning_rate: float = setting(1e-4, "peak AdamW learning rate", at_least=0.0)
    learning_rate_schedule: RateSchedule = setting(
        "linear", "after the warm-up: constant, or linear or cosine decay to 0 after the last step"
    )
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", at_least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0.0)
    grad_clip_norm: float = setting(1.0, "maximum gradient norm, 0 disables clipping", at_least=0.0)
    max_model_len: int | None = setting(
        None, "maximum tokens of a conversation; None is the model's limit", at_least=64
    )
    max_pixels: int | None = setting(
        None,
        "maximum pixels of a screenshot as the model sees it: server.max_pixels of the run that was recorded, or that "
        "follows; None is the model's limit",
        at_least=4096,
    )
    trainer_dtype: Literal["float32", "bfloat16"] = setting("float32", "precision of the trainer")
    micro_batch_tokens: int | None = setting(
        None, "maximum tokens of one forward pass; None is 16384, or what fits", at_least=64
    )
    gradient_checkpointing: bool | None = setting(
        None, "save memory by recomputing activations; None does so if they would not fit"
    )
    num_processes: int | None = setting(
        None, "data-parallel processes; None is one per visible GPU, one without GPUs", at_least=1
    )
    sharding: Sharding | None = setting(
        None,
        "weights on each GPU: none: all of them; full: its shard of each layer (FSDP); hybrid: the same, but "
        "each node of trainer_address holds all shards; offload: one layer at a time, from main memory; None is the "
        "first of none, full and offload that fits, and none with trainer_address",
    )
    num_threads: int | None = setting(None, "threads of each trainer process on CPU; None is one per core", at_least=1)
    trainer_address: str | None = setting(
        None,
        "address of a trainer on other hosts, such as 10.0.0.1:29400 (docs/more_machines.md); needs "
        "CUA_RL_TRAINER_TOKEN; None trains on this machine",
    )
    trainer_max_restarts: int = setting(
        2,
        "start the trainer again after one of its processes died, this many times at most without an optimizer step in "
        "between; 0 ends the run",
        at_least=0,
    )

    # Logging
    log_path: str | None = setting(None, "folder of the run; None is <log_dir>/<run name>", per_attempt=True)
    log_dir: str | None = setting(None, "parent folder of run folders; None is ./runs", per_attempt=True)
    wandb_project: str | None = setting(None, "Weights & Biases project; None disables it")
    wandb_name: str | None = setting(None, "Weights & Biases run name; None is the run's name")
    eval_every: int = setting(
        20, "steps between measurements of the held-out loss, 0 measures only before and after training", at_least=0
    )
    save_every: int = setting(50, "steps between checkpoints, 0 saves only at the end", at_least=0)
    save_every_epochs: int = setting(
        0, "also save a checkpoint every this many passes over the data, 0 for none", at_least=0
    )
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = setting(
        "ask", "what to do if the run's folder already holds a run; resume continues it", per_attempt=True
    )
    resume_step: int | None = setting(
        None,
        "resume after this step, with its weights and optimizer; later steps and checkpoints are deleted; None is the "
        "newest checkpoint",
        at_least=1,
        per_attempt=True,
    )
    dry_run: bool = setting(
        False,
        "check everything, including the data, print the effective configuration as JSON, and exit",
        per_attempt=True,
    )
    machine: str | None = setting(
        None,
        "dry_run: plan the memory of this machine instead, number of GPUs x GiB of each, such as 4x80",
        per_attempt=True,
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
