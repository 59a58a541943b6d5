"""Training configuration, and the presets of the embedded demo."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast

import chz

from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.config import Kernels, Loader, LossConfig, LossName, OptimConfig, Sharding
from cua_rl.families import LoraModule
from cua_rl.machine.presets import MACHINE_PRESETS, PresetName
from cua_rl.rl.advantages import AdvantageKind
from cua_rl.run.rollout_config import (
    PAID_DEVICES,
    ROLLOUT_SECTIONS,
    JudgeSettings,
    RolloutConfig,
    Tasks,
    device_presets,
    given_task_backend,
)
from cua_rl.settings import Given, setting, with_presets
from cua_rl.supervised.learning_rate import RateSchedule
from cua_rl.workers.worker_config import WorkerSettings

EMBEDDED_DEMO: dict[str, object] = {
    "tasks": {"source_type": "demo_training", "tags": ["demo"]},
    "eval_tasks": {"source_type": "demo_eval", "tags": ["demo"]},
    "lora_rank": 16,
    "group_size": 8,
    "groups_per_batch": 16,
    "learning_rate": 2e-3,
    "learning_rate_schedule": "linear",
    "advantages": "mean_std",
    "loss.normalisation": "token_mean",
    "max_steps": 24,
    "evaluation.eval_temperature": 0.5,
    "max_tokens": 48,
    "server.max_model_len": 2048,
    "eval_every": 0,
    "trainer.parity_limit": 0.02,
}
"""Settings of the embedded demo, used if no model is given: the tiny model learns in minutes on two cores."""

LOSS_CLIPS: Mapping[LossName, Given] = {
    "gspo": {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    "cispo": {"loss.clip_low": 1.0, "loss.clip_high": 4.0},
}
"""Of papers: a turn's ratio moves far less than a token's (arXiv 2507.18071), and CISPO bounds the weight from above
alone (arXiv 2506.13585), at 5 (arXiv 2510.13786)."""


def train_presets(given: Given) -> Given:
    """Defaults that depend on given settings: the machine, the demo if no model is given, tasks of the same source."""
    name = given.get("preset")
    chosen: Given = MACHINE_PRESETS[cast("PresetName", name)].settings if name in MACHINE_PRESETS else {}
    if given.get("base_url") is not None:  # its server has been started already
        chosen = {name: value for name, value in chosen.items() if name != "server.tensor_parallel"}
    given = MappingProxyType({**chosen, **given})
    demo = EMBEDDED_DEMO if given.get("model_name") is None else {}
    tasks, backend = given.get("tasks"), given_task_backend(given.get("tasks"))
    # pages and rows of the user's are the same for every seed, so they have no held-out tasks
    held_out = {} if backend is None else {"eval_tasks": None if backend in ("page", "harness") else tasks}
    clips = LOSS_CLIPS.get(cast("LossName", given.get("loss.name")), {})
    return {**chosen, **demo, **clips, **held_out, **device_presets(given)}


@chz.chz
class TrainerSettings:
    """The trainer processes: precision, memory, GPUs, and the check against the sampler (docs/dev/performance.md)."""

    lora_alpha: int = setting(32, "LoRA scale: the update is multiplied by lora_alpha / lora_rank", at_least=1)
    lora_modules: list[LoraModule] = setting(
        doc="parts of the model that get an adapter: language, merger, vision; a run ends at the start if the server "
        "does not apply them (docs/models.md)",
        factory=lambda: ["language"],
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
        None, "save memory by recomputing activations; None does so if they would not fit"
    )
    gpus: list[int] | None = setting(
        None, "GPUs, such as 2,3; None uses those not used by vLLM; a single GPU is shared"
    )
    num_processes: int | None = setting(
        None, "data-parallel processes; None is one per GPU of the trainer, one without GPUs", at_least=1
    )
    sharding: Sharding | None = setting(
        None,
        "weights on each GPU: none: all of them; full: its shard of each layer (FSDP); hybrid: the same, but "
        "each node of trainer.address holds all shards; offload: one layer at a time, from main memory; None is the "
        "first of none, full and offload that fits, and none with trainer.address",
    )
    vision_cache_gib: float | None = setting(
        None,
        "maximum main memory of each process for cached screenshot features, so that each screenshot is encoded once "
        "per step; None is 2, or on GPUs what a step's screenshots take, if there is room",
        at_least=0.0,
    )
    context_parallel: int = setting(
        1, "processes that share each row, for sequences too long for one; a divisor of their number", at_least=1
    )
    address: str | None = setting(
        None,
        "address of a trainer on other hosts, such as 10.0.0.1:29400 (docs/more_machines.md); needs "
        "CUA_RL_TRAINER_TOKEN; None trains on this machine",
    )
    max_restarts: int = setting(
        2,
        "start the trainer again after one of its processes died, this many times at most without an optimizer step in "
        "between; 0 ends the run",
        at_least=0,
    )
    parity_limit: float | None = setting(
        None,
        "stop the run if the mean absolute difference of sampler and trainer log-probabilities exceeds this, nats; "
        "None is 0.02 if both compute in float32; in half precision 0.1, or 0.2 for a mixture of experts",
        at_least=0.0,
    )

    @property
    def adapts_vision(self) -> bool:
        """Whether the adapter reaches vision tower or merger."""
        return set(self.lora_modules) != {"language"}


@chz.chz
class SamplingSettings:
    """Which rollouts run, how they are seeded, and which groups count."""

    seed: int | None = setting(
        None,
        "seed of all sampling, combined with step, group, rollout and turn; None samples without a seed",
        at_least=0,
    )
    min_group_size: int = setting(
        2,
        "a group is trained on only if at least this many of its rollouts end without an infrastructure fault",
        at_least=2,
    )
    watch_goal: bool = setting(
        False, "check the goal on the device after every turn, for rewards that depend on when it was first reached"
    )
    adaptive_concurrency: bool = setting(
        True, "reduce the number of concurrent rollouts while vLLM's KV cache or the machine's memory is full"
    )


@chz.chz
class CurriculumSettings:
    """Which tasks are sampled, and what happens to groups without a signal (docs/learning.md)."""

    task_sampling: Literal["uniform", "success_rate"] = setting(
        "uniform", "how tasks are sampled: uniform, or success_rate: less often if always or never solved"
    )
    refill_groups: bool = setting(
        False, "replace groups whose rewards are all equal, until groups_per_batch groups have differing rewards"
    )
    max_refill_factor: int = setting(
        3, "refill_groups: maximum number of groups per step, as a multiple of groups_per_batch", at_least=1
    )
    replay_successes: bool = setting(
        False,
        "if all rollouts of a group fail, add a stored success of its task (off-policy: use loss=ppo, for example)",
    )
    replay_capacity: int = setting(2, "replay_successes: maximum number of successes stored per task", at_least=1)


@chz.chz
class EvaluationSettings:
    """Evaluations on held-out tasks."""

    num_eval_rollouts: int = setting(64, "held-out task instances per evaluation", at_least=1)
    eval_attempts: int = setting(1, "rollouts of each held-out task instance, for pass@k", at_least=1)
    eval_temperature: float | None = setting(
        None, "sampling temperature during evaluation, 0 for greedy; None uses the training temperature", at_least=0.0
    )
    skip_baseline: bool = setting(False, "skip the evaluation before training")


@chz.chz
class TrainingJudgeSettings(JudgeSettings):
    """The judge of tasks without a validator, enabled by `judge.model`, and its required precision (docs/judge.md)."""

    min_precision: float | None = setting(
        None,
        "refuse a judge unless the lower end of the 95 % interval of its calibrated precision is at least this, as "
        "recorded and with as many failures as successes; None only warns if there is no calibration",
        within=(0.0, 1.0),
    )
    calibration: str | None = setting(
        None, "calibration file from recipes.calibrate_judge; None searches <log_dir>/judge_calibrations"
    )
    force: bool = setting(False, "train with a judge that judge.min_precision would refuse")


@chz.chz
class MonitorSettings:
    """The Training Monitor beside the run, and a remote one to which the run is sent."""

    show: bool = setting(True, "start a Training Monitor for the run on the loopback address", for_group=True)
    port: int | None = setting(None, "port of that monitor; None is 8720, or a free one", within=(0, 65535))
    base_url: str | None = setting(None, "address of a remote monitor to which the run is sent; also MONITOR_BASE_URL")
    project_id: str | None = setting(None, "project on the remote monitor, for links; also PROJECT_ID")
    project_token: str | None = setting(
        None,
        "token of that project, never stored; set MONITOR_PROJECT_TOKEN in the environment, or project_token_file=PATH",
    )


@chz.chz
class CheckpointSettings:
    """When checkpoints are saved, which of them stay on disk, and from which one a run resumes, with what."""

    save_every_epochs: int = setting(
        0, "also save a checkpoint every this many passes over the training tasks, 0 for none", at_least=0
    )
    keep_checkpoints: int = setting(3, "number of newest checkpoints to keep on disk, 0 for all", at_least=0)
    keep_every: int = setting(0, "also keep checkpoints whose step is a multiple of this, 0 for none", at_least=0)
    resume_step: int | None = setting(
        None,
        "resume after this step, with its weights, optimizer and settings; later steps and checkpoints are deleted; "
        "None is the newest checkpoint",
        at_least=1,
        per_attempt=True,
    )
    resume_with: Literal["same", "changes"] = setting(
        "same",
        "same: a resumed run keeps tasks, evaluation, loss and reward; changes: it may have others, and then begins a "
        "new curve with a baseline of its own",
        per_attempt=True,
    )


@with_presets(train_presets, explain_field, accept_value)
@chz.chz
class CLIConfig(RolloutConfig):
    """Train a vision computer-use agent with group-relative policy gradients."""

    # Model
    preset: PresetName | None = setting(
        None, "defaults for a machine: model, context, screens and number of devices that fit (docs/gpus.md)"
    )
    lora_rank: int = setting(32, "rank of the LoRA adapter", at_least=1)
    load_checkpoint_path: str | None = setting(
        None, "folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )
    tinker_api_key: str | None = setting(
        None, "accepted for compatibility with Tinker command lines; not used, never stored"
    )

    # Tasks
    eval_tasks: Tasks | None = setting(
        doc="source of held-out tasks (TaskSourceConfig); None disables evaluation",
        factory=lambda: {"source_type": "demo_eval"},
    )
    seed: int = setting(0, "seed of task order, task instances and initial adapter weights", at_least=0)

    # Training
    max_steps: int = setting(100, "number of training steps", at_least=1)
    group_size: int = setting(4, "rollouts per task instance; advantages are computed within this group")
    groups_per_batch: int = setting(10, "task instances per training step", at_least=1)
    learning_rate: float = setting(
        1e-5, "AdamW learning rate; 0 leaves the weights unchanged, useful as a control run", at_least=0.0
    )
    learning_rate_schedule: RateSchedule = setting(
        "constant", "constant, or linear or cosine decay to 0 after the last step"
    )
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", at_least=0)
    temperature: float = setting(1.0, "sampling temperature during training", within=(0.0, 2.0))
    advantages: AdvantageKind = setting(
        "mean",
        "mean: centre rewards within the group; mean_std: also divide by the group's std; leave_one_out: "
        "subtract the mean of the others; batch_std: centre within the group, divide by the step's std",
    )
    kl_penalty_coef: float = setting(
        0.0, "coefficient of the per-token KL penalty against the reference model, in the reward", at_least=0.0
    )
    num_substeps: int = setting(1, "optimizer steps per training step, each on its share of the rollouts", at_least=1)
    max_steps_off_policy: int | None = setting(
        None,
        "None or 0: synchronous, on-policy training; k: asynchronous training with a policy lag of at most k steps",
        at_least=0,
    )

    # Run
    log_dir: str | None = setting(None, "parent folder of run folders; None is ./runs", per_attempt=True)
    wandb_project: str | None = setting(None, "Weights & Biases project; None disables it")
    wandb_name: str | None = setting(None, "Weights & Biases run name; None is the run's name")
    eval_every: int = setting(10, "steps between evaluations, 0 evaluates only before and after training", at_least=0)
    save_every: int = setting(10, "steps between checkpoints, 0 saves only at the end", at_least=0)
    num_groups_to_log: int = setting(1, "groups per step whose rewards are printed and logged", at_least=0)
    trace: bool = setting(
        False,
        "write each rollout to trace/ in the run's folder: screenshots with the actions drawn on them, and the text",
    )
    rollout_workers: int = setting(
        0,
        "processes on this machine that operate devices and agents, each a share of max_concurrent_rollouts; with 0 "
        "the run itself does (docs/more_machines.md)",
        at_least=0,
    )
    compute_post_kl: bool = setting(
        False, "measure the KL divergence of each step's update (one more forward pass, two with sub-steps)"
    )

    # Groups
    loss: LossConfig = chz.field(default_factory=LossConfig)
    adam: OptimConfig = chz.field(default_factory=OptimConfig)
    trainer: TrainerSettings = chz.field(default_factory=TrainerSettings)
    sampling: SamplingSettings = chz.field(default_factory=SamplingSettings)
    curriculum: CurriculumSettings = chz.field(default_factory=CurriculumSettings)
    evaluation: EvaluationSettings = chz.field(default_factory=EvaluationSettings)
    judge: TrainingJudgeSettings = chz.field(default_factory=TrainingJudgeSettings)
    monitor: MonitorSettings = chz.field(default_factory=MonitorSettings)
    checkpoints: CheckpointSettings = chz.field(default_factory=CheckpointSettings)
    workers: WorkerSettings = chz.field(default_factory=WorkerSettings)

    @property
    def has_workers(self) -> bool:
        """Whether rollouts run in other processes."""
        return self.rollout_workers > 0 or self.workers.port is not None

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
    def _loss_is_a_policy_loss(self) -> None:
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
