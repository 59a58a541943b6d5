"""What a training run can be told. The embedded demo presets some of it."""

from typing import Literal

import chz

from cua_rl.config import KlKind, Normalisation
from cua_rl.recipes.number_checks import check_numbers
from cua_rl.recipes.presets import Given, with_presets
from cua_rl.recipes.rollout_config import RolloutConfig, Tasks, device_presets, given_site
from cua_rl.rl.advantages import AdvantageKind
from cua_rl.rl.train_step import Schedule

EMBEDDED_DEMO: dict[str, object] = {
    "tasks": {"source_type": "demo_training", "tags": ["demo"]},
    "eval_tasks": {"source_type": "demo_eval", "tags": ["demo"]},
    "lora_rank": 16,
    "group_size": 8,
    "groups_per_batch": 16,
    "learning_rate": 2e-3,
    "learning_rate_schedule": "linear",
    "advantages": "mean_std",
    "normalisation": "token_mean",
    "max_steps": 48,
    "eval_temperature": 0.5,
    "max_tokens": 48,
    "max_model_len": 2048,
    "eval_every": 0,
    "parity_limit": 0.02,
}
"""Settings of the embedded demo, used where no model is named: the tiny model learns in minutes on two cores."""


def train_presets(given: Given) -> Given:
    """What the settings that are given preset: the demo without a model, held-out tasks of the same site."""
    demo = EMBEDDED_DEMO if given.get("model_name") is None else {}
    tasks, site = given.get("tasks"), given_site(given.get("tasks"))
    # pages of the user's own are the same for every seed: nothing of them is held out
    held_out = {} if site is None else {"eval_tasks": None if site == "page" else tasks}
    return {**demo, **held_out, **device_presets(given)}


@with_presets(train_presets)
@chz.chz
class CLIConfig(RolloutConfig):
    """Train a vision computer-use agent with group-relative policy gradients."""

    # Model
    model_name: str | None = chz.field(
        default=None,
        doc="folder or hub id of a Qwen3-VL model; None is the tiny model of this package (the embedded demo)",
    )
    lora_rank: int = chz.field(default=32, doc="rank of the LoRA adapter")
    lora_alpha: int = chz.field(default=32, doc="the adapter's update is scaled by lora_alpha / lora_rank")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )

    # Rollouts
    max_concurrent_rollouts: int = chz.field(default=128, doc="most devices in use at a time; 8 with GBox and gyms")
    tinker_api_key: str | None = chz.field(
        default=None, doc="key of a Tinker service; not used by this stack, never stored"
    )

    # Tasks
    tasks: Tasks = chz.field(
        default_factory=lambda: {"source_type": "demo_training"},
        doc="where training tasks come from (TaskSourceConfig)",
    )
    eval_tasks: Tasks | None = chz.field(
        default_factory=lambda: {"source_type": "demo_eval"},
        doc="where held-out tasks come from; None for no evaluation",
    )
    num_eval_rollouts: int = chz.field(default=64, doc="held-out task instances per evaluation")
    skip_baseline: bool = chz.field(default=False, doc="no evaluation before training")
    eval_attempts: int = chz.field(default=1, doc="rollouts of each held-out task instance, for pass@k")
    max_concurrent_eval_rollouts: int | None = chz.field(
        default=None, doc="most devices in use at a time in an evaluation; None is max_concurrent_rollouts"
    )
    seed: int = chz.field(default=0, doc="seed of task order, task instances and initial adapter weights")

    # Training
    max_steps: int = chz.field(default=100, doc="training steps of the run")
    group_size: int = chz.field(default=4, doc="rollouts of one task instance that are compared with each other")
    min_group_size: int = chz.field(
        default=2, doc="rollouts of a group that must survive faults of devices and servers for it to be trained on"
    )
    groups_per_batch: int = chz.field(default=10, doc="task instances per training step")
    refill_groups: bool = chz.field(
        default=False, doc="replace groups whose rewards are all equal, until groups_per_batch groups teach something"
    )
    max_refill_factor: int = chz.field(
        default=3, doc="refill_groups: most groups that a step runs, as a multiple of groups_per_batch"
    )
    task_sampling: Literal["uniform", "success_rate"] = chz.field(
        default="uniform",
        doc="which tasks a step draws: uniform, or success_rate: fewer of those always or never solved",
    )
    replay_successes: bool = chz.field(
        default=False,
        doc="where a whole group fails, train on a stored success of its task too (off-policy: wants loss=ppo, say)",
    )
    replay_capacity: int = chz.field(default=2, doc="replay_successes: most successes stored per task")
    learning_rate: float = chz.field(default=1e-5, doc="AdamW step size; 0 trains nothing and is useful as a control")
    learning_rate_schedule: Schedule = chz.field(
        default="constant", doc="constant, or linear or cosine: falling to a twentieth at the last step"
    )
    warmup_steps: int = chz.field(default=0, doc="steps over which the learning rate rises from near 0")
    adam_beta1: float = chz.field(default=0.9, doc="AdamW: decay of the gradient's mean")
    adam_beta2: float = chz.field(default=0.95, doc="AdamW: decay of the gradient's square")
    adam_eps: float = chz.field(default=1e-8, doc="AdamW: added to the root of the second moment")
    weight_decay: float = chz.field(default=0.0, doc="AdamW: decoupled weight decay")
    temperature: float = chz.field(default=1.0, doc="sampling temperature of training")
    eval_temperature: float | None = chz.field(
        default=None, doc="sampling temperature of evaluation, 0 for greedy; None is the one of training"
    )
    loss: Literal["importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo"] = chz.field(
        default="importance_sampling", doc="policy loss (docs/losses.md says which to use when)"
    )
    clip_low: float = chz.field(
        default=0.2, doc="all losses but importance_sampling: the ratio is clipped below at 1 - clip_low"
    )
    clip_high: float = chz.field(
        default=0.2, doc="the ratio is clipped above at 1 + clip_high; gspo wants about 0.0004"
    )
    dual_clip: float | None = chz.field(
        default=None, doc="ppo, decoupled_ppo: most that a token of negative advantage weighs, e.g. 3; None is no limit"
    )
    tis_cap: float | None = chz.field(
        default=None, doc="truncate the weight of trainer over sampler probability here, e.g. 2; None keeps it whole"
    )
    icepop_low: float | None = chz.field(
        default=None, doc="leave out tokens whose trainer/sampler ratio is lower, e.g. 0.5; None leaves out none"
    )
    icepop_high: float | None = chz.field(
        default=None, doc="leave out tokens whose trainer/sampler ratio is higher, e.g. 5; None leaves out none"
    )
    normalisation: Normalisation = chz.field(
        default="constant",
        doc="what a step's loss is divided by: constant (rollouts x normalisation_tokens), token_mean, sequence_mean, "
        "or token_sum (nothing)",
    )
    normalisation_tokens: int = chz.field(
        default=1000, doc="constant: sampled tokens of a typical rollout; a guess will do, AdamW forgets the scale"
    )
    reward: str = chz.field(
        default="binary",
        doc="what a rollout is worth: binary, score, completion, efficiency, shaped, comprehensive, judge (as binary, "
        "for tasks that a judge decides), or module:function",
    )
    judge_min_precision: float | None = chz.field(
        default=None,
        doc="refuse a judge unless its calibration shows this precision (lower end of the 95 % interval); None warns "
        "of a judge without calibration",
    )
    judge_calibration: str | None = chz.field(
        default=None,
        doc="file that recipes.calibrate_judge wrote; None looks for this judge's in <log_dir>/judge_calibrations",
    )
    judge_force: bool = chz.field(default=False, doc="train on a judge that judge_min_precision would refuse")
    watch_goal: bool = chz.field(
        default=False, doc="read the goal from the device after every turn too, for rewards that ask when it first held"
    )
    advantages: AdvantageKind = chz.field(
        default="mean",
        doc="mean: centre rewards in the group; mean_std: also divide by the group's std; leave_one_out: compare with "
        "the others' mean; batch_std: centre in the group, divide by the step's std",
    )
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="weight of the KL divergence from the base model in the reward, token by token"
    )
    kl_loss_coef: float = chz.field(default=0.0, doc="weight of the KL divergence from the base model in the loss")
    kl_loss_kind: KlKind = chz.field(
        default="k3", doc="how the divergence in the loss is estimated, for the metric: k1, k2 or k3; same gradient"
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps per training step, each on its share of the rollouts")
    train_early: bool = chz.field(
        default=False,
        doc="synchronous training: begin with groups that have ended while others still run; same step, sooner done "
        "where the trainer has a device of its own",
    )
    grad_clip_norm: float = chz.field(default=1.0, doc="largest gradient norm, 0 for none")
    parity_limit: float = chz.field(
        default=0.05,
        doc="largest mean difference of sampler and trainer log-probabilities, nats; above it the run stops",
    )
    max_steps_off_policy: int | None = chz.field(
        default=None,
        doc="None or 0: synchronous, on-policy training; k: rollouts go on while steps train, at most k steps old",
    )
    force_untruncated: bool = chz.field(
        default=False, doc="max_steps_off_policy, replay_successes: allow a loss whose ratio nothing bounds"
    )
    sampling_seed: int | None = chz.field(
        default=None, doc="seed of every sampled token, by step, group, rollout and turn; None draws afresh each time"
    )
    adaptive_concurrency: bool = chz.field(
        default=True, doc="let fewer rollouts run while vLLM's KV cache or the machine's memory is full"
    )

    # Engine
    base_url: str | None = chz.field(
        default=None, doc="URL of a vLLM server that is already running (with LoRA updating on); None starts one"
    )
    server_port: int | None = chz.field(
        default=None, doc="port of the vLLM server that the run starts; None takes a free one"
    )
    max_model_len: int = chz.field(default=16384, doc="longest prompt plus answer, tokens")
    trainer_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="precision of the trainer; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    micro_batch_tokens: int = chz.field(default=16384, doc="most tokens of one forward pass of the trainer")
    gradient_checkpointing: bool = chz.field(default=False, doc="save trainer memory by recomputing activations")
    trainer_gpus: list[int] | None = chz.field(
        default=None, doc="GPUs of the trainer, such as 2,3; None is those that vLLM leaves, a single GPU is shared"
    )
    trainer_num_processes: int | None = chz.field(
        default=None,
        doc="trainer processes that share every step's work; None is one per GPU of the trainer, one without GPUs",
    )
    trainer_sharding: Literal["none", "full"] = chz.field(
        default="none",
        doc="what each trainer process holds of the frozen model: none: all of it; full: its share of each layer",
    )
    vision_cache_gib: float = chz.field(
        default=2.0, doc="most main memory for screenshots' features, so that the trainer encodes each once per step"
    )

    # Logging
    log_path: str | None = chz.field(default=None, doc="folder of the run; None is <log_dir>/<run name>")
    log_dir: str | None = chz.field(default=None, doc="folder in which the run's folder is made; None is ./runs")
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None does not use it")
    wandb_name: str | None = chz.field(default=None, doc="Weights & Biases run name; None is the run's name")
    monitor: bool = chz.field(default=True, doc="show the run in the browser while it goes on, on this machine only")
    monitor_port: int | None = chz.field(default=None, doc="port of that monitor; None is 8720, or a free one")
    monitor_base_url: str | None = chz.field(
        default=None, doc="address of another monitor to send the run to; MONITOR_BASE_URL says the same"
    )
    project_id: str | None = chz.field(default=None, doc="project there, for links; PROJECT_ID says the same")
    project_token: str | None = chz.field(
        default=None, doc="token of that project, never stored; better put it into MONITOR_PROJECT_TOKEN"
    )
    eval_every: int = chz.field(default=10, doc="evaluate every so many steps, 0 only before and after")
    save_every: int = chz.field(default=10, doc="save a checkpoint every so many steps, 0 only at the end")
    keep_checkpoints: int = chz.field(default=3, doc="newest checkpoints that stay on disk, 0 for all")
    keep_every: int = chz.field(
        default=0, doc="checkpoints whose step is a multiple of this stay on disk too, 0 for none"
    )
    num_groups_to_log: int = chz.field(default=1, doc="groups per step whose rewards are shown and logged")
    trace: bool = chz.field(
        default=False,
        doc="write each rollout into trace/ of the run's folder: screenshots with the action drawn, and the text",
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="measure how far each step moved the policy (one more forward pass)"
    )
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = chz.field(
        default="ask", doc="what to do if the run's folder holds a run already"
    )
    dry_run: bool = chz.field(
        default=False, doc="check everything, print the effective configuration as JSON, and exit"
    )

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self, _SMALLEST, _RANGES)

    @chz.validate
    def _groups_can_be_compared(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size: expected at least 2, because advantages compare the rollouts of a group, got "
                f"{self.group_size!r}; set group_size=2 or more"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size: expected at most group_size={self.group_size}, got {self.min_group_size!r}; lower it"
            )


_SMALLEST = {
    "min_group_size": 2,
    "lora_rank": 1,
    "lora_alpha": 1,
    "max_concurrent_rollouts": 1,
    "num_eval_rollouts": 1,
    "eval_attempts": 1,
    "max_concurrent_eval_rollouts": 1,
    "seed": 0,
    "max_steps": 1,
    "groups_per_batch": 1,
    "max_refill_factor": 1,
    "replay_capacity": 1,
    "learning_rate": 0.0,
    "eval_temperature": 0.0,
    "kl_penalty_coef": 0.0,
    "kl_loss_coef": 0.0,
    "normalisation_tokens": 1,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "num_substeps": 1,
    "grad_clip_norm": 0.0,
    "parity_limit": 0.0,
    "max_model_len": 64,
    "micro_batch_tokens": 64,
    "trainer_num_processes": 1,
    "vision_cache_gib": 0.0,
    "eval_every": 0,
    "save_every": 0,
    "max_steps_off_policy": 0,
    "sampling_seed": 0,
    "keep_checkpoints": 0,
    "keep_every": 0,
    "num_groups_to_log": 0,
}
_RANGES = {
    "temperature": (0.0, 2.0),
    "judge_min_precision": (0.0, 1.0),
    "adam_beta1": (0.0, 0.9999),
    "adam_beta2": (0.0, 0.99999),
    "adam_eps": (0.0, 1.0),
    "clip_low": (0.0, 1.0),
    "clip_high": (0.0, 10.0),
    "server_port": (0, 65535),
    "monitor_port": (0, 65535),
}
