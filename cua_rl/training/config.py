"""The trainer's configuration: of its processes, of the loss, and of the optimizer. Does not import torch.

One class each for people, the run and the processes: the run fills in what is `by_run`, and chooses what is None.
"""

from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.fields import setting
from cua_rl.renderers.families import LoraModule

LossName = Literal[
    "importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo", "dppo", "dro", "stable_reinforce", "cross_entropy"
]
Loader = Literal["hf", "unsloth"]
Kernels = Literal["torch", "compiled"]
Sharding = Literal["replicated", "full", "hybrid", "offload"]
RateSchedule = Literal["constant", "linear", "cosine"]
Normalisation = Literal["constant", "token_mean", "sequence_mean", "token_sum"]

ROW_TOKENS = 16384
"""Default tokens of one forward pass."""
VISION_CACHE_GIB = 2.0
"""Features of about 40 screenshots, for a 4B model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapter of one of several models that a trainer trains."""

    rank: int
    alpha: int = 32
    """The update is multiplied by alpha / rank."""
    modules: tuple[LoraModule, ...] = ("language",)
    seed: int = 0
    """Of its initial weights."""

    @property
    def adapts_vision(self) -> bool:
        """Whether the adapter reaches vision tower or merger."""
        return set(self.modules) != {"language"}


@chz.chz
class TrainerConfig:
    """The trainer processes: precision, memory, GPUs, and the check against the sampler (docs/dev/performance.md)."""

    lora_alpha: int = setting(32, "LoRA scale: the update is multiplied by lora_alpha / lora_rank", at_least=1)
    lora_modules: tuple[LoraModule, ...] = setting(
        ("language",),
        "parts of the model that get an adapter: language, merger, vision; a run ends at the start if the server does "
        "not apply one (docs/models.md)",
    )
    loader: Loader = setting("hf", "what loads the model: hf (Transformers), or unsloth on a GPU (docs/models.md)")
    kernels: Kernels = setting(
        "torch", "norms, rotations and SwiGLU of the language model: torch, or compiled (docs/models.md)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "precision; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    micro_batch_tokens: int | None = setting(
        None, "maximum tokens of one forward pass; None is 16384, or what fits", at_least=64
    )
    gradient_checkpointing: bool | None = setting(
        None, "save memory by recomputing activations; None: only if they would not fit otherwise"
    )
    gpus: tuple[int, ...] | None = setting(
        None, "GPUs, such as 2,3; None uses those that vLLM does not use; a single GPU is shared"
    )
    num_processes: int | None = setting(
        None, "data-parallel processes (of each node); None is one per GPU of the trainer, one without GPUs", at_least=1
    )
    num_threads: int | None = setting(None, "threads of each process on a CPU; None is one per core", at_least=1)
    sharding: Sharding | None = setting(
        None,
        "weights on each GPU: replicated: all of them; full: a shard of each layer (FSDP); hybrid: the same, but each "
        "of trainer.num_nodes nodes holds all shards; offload: one layer at a time, from main memory; None is the "
        "first of replicated, full and offload that fits, or replicated with trainer.num_nodes",
    )
    vision_cache_gib: float | None = setting(
        None,
        "maximum main memory of each process for cached screenshot features, so that each screenshot is encoded once "
        "per step; None is 2, or on GPUs as much as a step's screenshots need, if there is room",
        at_least=0.0,
    )
    context_parallel: int = setting(
        1, "processes that share each row, for sequences too long for one; must divide their number", at_least=1
    )
    num_nodes: int | None = setting(
        None, "nodes of a Ray cluster that train (docs/more_machines.md); None trains on this machine", at_least=1
    )
    max_restarts: int = setting(
        2,
        "maximum number of trainer restarts for one request, after one of its processes died; 0 ends the run instead",
        at_least=0,
    )
    parity_limit: float | None = setting(
        None,
        "stop the run if the mean absolute difference of sampler and trainer log-probabilities exceeds this, nats; "
        "None is 0.02 if both compute in float32; in half precision 0.1, or 0.2 for a mixture of experts",
        at_least=0.0,
    )

    model_path: Path = setting(Path(), "folder of the checkpoint, its tokenizer and preprocessor settings", by_run=True)
    lora_rank: int = setting(32, "rank of the adapter; 0 trains all parameters (supervised)", by_run=True)
    seed: int = setting(0, "seed of the adapter's initial weights, and of everything random", by_run=True)
    max_pixels: int | None = setting(None, "server.max_pixels", by_run=True)
    gpu_names: tuple[str, ...] = setting((), "its GPUs in CUDA_VISIBLE_DEVICES; () are all visible ones", by_run=True)
    keeps_attention: bool = setting(
        False, "with gradient_checkpointing, still keep the results of attention", by_run=True
    )
    memory_fraction: float = setting(1.0, "share of its GPU's memory that a process may allocate", by_run=True)

    @property
    def adapts_vision(self) -> bool:
        """Whether the adapter reaches vision tower or merger."""
        return set(self.lora_modules) != {"language"}

    @property
    def lora(self) -> LoraSpec | None:
        """The adapter; None if all weights are trained."""
        if not self.lora_rank:
            return None
        return LoraSpec(rank=self.lora_rank, alpha=self.lora_alpha, modules=self.lora_modules, seed=self.seed)


@chz.chz
class LossConfig:
    """The policy loss and its constants (docs/losses.md has formulas, sources and recommendations)."""

    name: LossName = setting(
        "importance_sampling",
        "policy loss (to imitate, use python -m cua_rl.recipes.sft)",
        for_group=True,
        not_offered=("cross_entropy",),
    )
    clip_low: float = setting(
        0.2,
        "ppo, cispo, gspo, decoupled_ppo: lower clip of the ratio is 1 - clip_low; dppo: largest fall of a probability",
        within=(0.0, 1.0),
    )
    clip_high: float = setting(
        0.2,
        "ppo, cispo, gspo, decoupled_ppo: upper clip of the ratio is 1 + clip_high; dppo: largest rise of a "
        "probability",
        within=(0.0, 10.0),
    )
    dro_beta: float = setting(0.05, "dro: coefficient of the quadratic penalty", at_least=0.0)
    dual_clip: float | None = setting(
        None, "ppo, decoupled_ppo: maximum weight of a token with negative advantage, such as 3; None disables it"
    )
    tis_cap: float | None = setting(
        None,
        "truncated importance sampling: cap on the trainer/sampler ratio as a weight, such as 2; None leaves the "
        "ratio inside the loss",
    )
    icepop_low: float | None = setting(
        None, "mask tokens whose trainer/sampler ratio is lower, such as 0.5; None disables it"
    )
    icepop_high: float | None = setting(
        None, "mask tokens whose trainer/sampler ratio is higher, such as 5; None disables it"
    )
    kl_loss_coef: float = setting(
        0.0, "coefficient of the KL divergence from the reference model, in the loss", at_least=0.0
    )
    normalisation: Normalisation = setting(
        "constant",
        "divisor of a step's summed loss: constant (rollouts x normalisation_tokens), token_mean, "
        "sequence_mean, or token_sum (1)",
    )
    normalisation_tokens: int = setting(
        1000,
        "constant: trained tokens of a typical rollout, the same for every step; only sets the scale, to which "
        "AdamW is invariant",
        at_least=1,
    )
    force_untruncated: bool = setting(
        False,
        "train on tokens of older policies (max_steps_off_policy, replay_successes, num_substeps) although the loss "
        "does not bound their importance ratio",
    )
    temperature: float = setting(1.0, "the sampler's temperature, at which log-probabilities are computed", by_run=True)

    @property
    def has_behaviour_weight(self) -> bool:
        """True if the loss keeps two ratios apart: training/proximal, which it clips, and proximal/sampling."""
        masks = self.icepop_low is not None or self.icepop_high is not None
        return self.name == "decoupled_ppo" or self.tis_cap is not None or masks

    @property
    def bounds_ratio(self) -> bool:
        """True if something keeps a token of an old policy from outweighing all others by its ratio."""
        if self.has_behaviour_weight:
            return self.tis_cap is not None or self.icepop_high is not None
        return self.name != "importance_sampling"


@chz.chz
class OptimConfig:
    """AdamW with gradient clipping."""

    learning_rate: float = setting(1e-5, "learning rate of this optimizer step", by_run=True)
    beta1: float = setting(0.9, "decay rate of the first moment", by_run=True)
    beta2: float = setting(0.95, "decay rate of the second moment", by_run=True)
    eps: float = setting(1e-8, "added to the square root of the second moment", by_run=True)
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0.0)
    grad_clip_norm: float = setting(1.0, "maximum gradient norm, 0 disables clipping", at_least=0.0)


@chz.chz
class CheckpointSettings:
    """When checkpoints are saved, which of them stay on disk, and how a run resumes from one."""

    save_every_epochs: int = setting(
        0, "passes over the training tasks or data between additional checkpoints; 0 for none", at_least=0
    )
    keep_checkpoints: int = setting(3, "number of newest checkpoints to keep on disk; 0 for all", at_least=0)
    keep_every: int = setting(0, "also keep checkpoints whose step is a multiple of this; 0 for none", at_least=0)
    resume_step: int | None = setting(
        None,
        "resume after this step, with its weights, optimizer and settings; later steps and checkpoints are deleted; "
        "None is the newest checkpoint",
        at_least=1,
        per_attempt=True,
    )
    resume_with: Literal["same", "changes"] = setting(
        "same",
        "same: a resumed run keeps tasks, evaluation, loss and reward; changes: it may change them, and then begins a "
        "new curve with its own baseline",
        per_attempt=True,
    )


@chz.chz
class LearningConfig:
    """How a model learns, from rewards or from examples, and what a run records and saves."""

    lora_rank: int = setting(32, "rank of the LoRA adapter; 0 trains all weights (recipes.sft only)", at_least=0)
    load_checkpoint_path: str | None = setting(
        None, "folder weights/<step> of an earlier run, or run@step, to start from with a fresh optimizer"
    )
    seed: int = setting(0, "seed of the order of tasks or data, task instances and initial adapter weights", at_least=0)
    learning_rate: float = setting(
        1e-5, "AdamW learning rate; 0 leaves the weights unchanged, useful as a control run", at_least=0.0
    )
    learning_rate_schedule: RateSchedule = setting(
        "constant", "constant, or linear or cosine decay to 0 after the last step"
    )
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", at_least=0)
    log_dir: str | None = setting(None, "parent folder of run folders; None is ./runs", per_attempt=True)
    wandb_project: str | None = setting(None, "Weights & Biases project; None disables it")
    wandb_name: str | None = setting(None, "Weights & Biases run name; None is the run's name")
    eval_every: int = setting(10, "steps between evaluations; 0 evaluates only before and after training", at_least=0)
    save_every: int = setting(10, "steps between saved checkpoints; 0 saves only the last one", at_least=0)
    adam: OptimConfig = chz.field(default_factory=OptimConfig)
    trainer: TrainerConfig = chz.field(default_factory=TrainerConfig)
    checkpoints: CheckpointSettings = chz.field(default_factory=CheckpointSettings)

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """The learning rate of `step`, counted from 1: linear warm-up over `warmup_steps`, then the schedule.

        "linear" and "cosine" decay to 0, as in Transformers, and reach it after the last step, not in it: at rate 0 the
        rollouts of a step would be wasted. The first step after the warm-up has the full rate, and so has a single one.
        """
        highest, warmup_steps = self.learning_rate, self.warmup_steps
        if step <= warmup_steps:
            return highest * step / (warmup_steps + 1)
        progress = (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps)
        match self.learning_rate_schedule:
            case "constant":
                return highest
            case "linear":
                return highest * (1 - progress)
            case "cosine":
                return highest * (1 + cos(pi * progress)) / 2
