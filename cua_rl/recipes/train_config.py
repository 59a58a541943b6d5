"""Training configuration, and the presets of the embedded demo."""

from typing import Literal

import chz

from cua_rl.config import Normalisation
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
"""Settings of the embedded demo, used if no model is given: the tiny model learns in minutes on two cores."""


def train_presets(given: Given) -> Given:
    """Defaults that depend on given settings: the demo if no model is given, held-out tasks of the same site."""
    demo = EMBEDDED_DEMO if given.get("model_name") is None else {}
    tasks, site = given.get("tasks"), given_site(given.get("tasks"))
    # custom pages are the same for every seed, so they have no held-out tasks
    held_out = {} if site is None else {"eval_tasks": None if site == "page" else tasks}
    return {**demo, **held_out, **device_presets(given)}


@with_presets(train_presets)
@chz.chz
class CLIConfig(RolloutConfig):
    """Train a vision computer-use agent with group-relative policy gradients."""

    # Model
    model_name: str | None = chz.field(
        default=None,
        doc="folder or hub id of a dense Qwen3-VL model; None uses the included tiny model (embedded demo)",
    )
    lora_rank: int = chz.field(default=32, doc="rank of the LoRA adapter")
    lora_alpha: int = chz.field(default=32, doc="LoRA scale: the update is multiplied by lora_alpha / lora_rank")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )

    # Rollouts
    max_concurrent_rollouts: int = chz.field(
        default=128, doc="maximum number of devices in use at a time; 8 with GBox and gyms"
    )
    tinker_api_key: str | None = chz.field(
        default=None, doc="accepted for compatibility with Tinker command lines; not used, never stored"
    )

    # Tasks
    tasks: Tasks = chz.field(
        default_factory=lambda: {"source_type": "demo_training"},
        doc="source of training tasks (TaskSourceConfig)",
    )
    eval_tasks: Tasks | None = chz.field(
        default_factory=lambda: {"source_type": "demo_eval"},
        doc="source of held-out tasks (TaskSourceConfig); None disables evaluation",
    )
    num_eval_rollouts: int = chz.field(default=64, doc="held-out task instances per evaluation")
    skip_baseline: bool = chz.field(default=False, doc="skip the evaluation before training")
    eval_attempts: int = chz.field(default=1, doc="rollouts of each held-out task instance, for pass@k")
    max_concurrent_eval_rollouts: int | None = chz.field(
        default=None,
        doc="maximum number of devices in use at a time during evaluation; None uses max_concurrent_rollouts",
    )
    seed: int = chz.field(default=0, doc="seed of task order, task instances and initial adapter weights")

    # Training
    max_steps: int = chz.field(default=100, doc="number of training steps")
    group_size: int = chz.field(default=4, doc="rollouts per task instance; advantages are computed within this group")
    min_group_size: int = chz.field(
        default=2,
        doc="a group is trained on only if at least this many of its rollouts end without an infrastructure fault",
    )
    groups_per_batch: int = chz.field(default=10, doc="task instances per training step")
    refill_groups: bool = chz.field(
        default=False,
        doc="replace groups whose rewards are all equal, until groups_per_batch groups have differing rewards",
    )
    max_refill_factor: int = chz.field(
        default=3, doc="refill_groups: maximum number of groups per step, as a multiple of groups_per_batch"
    )
    task_sampling: Literal["uniform", "success_rate"] = chz.field(
        default="uniform",
        doc="how tasks are sampled: uniform, or success_rate: less often if always or never solved",
    )
    replay_successes: bool = chz.field(
        default=False,
        doc="if all rollouts of a group fail, add a stored success of its task (off-policy: use loss=ppo, for example)",
    )
    replay_capacity: int = chz.field(default=2, doc="replay_successes: maximum number of successes stored per task")
    learning_rate: float = chz.field(
        default=1e-5, doc="AdamW learning rate; 0 leaves the weights unchanged, useful as a control run"
    )
    learning_rate_schedule: Schedule = chz.field(
        default="constant", doc="constant, or linear or cosine decay to a twentieth at the last step"
    )
    warmup_steps: int = chz.field(default=0, doc="steps of linear learning-rate warm-up")
    adam_beta1: float = chz.field(default=0.9, doc="AdamW: decay rate of the first moment")
    adam_beta2: float = chz.field(default=0.95, doc="AdamW: decay rate of the second moment")
    adam_eps: float = chz.field(default=1e-8, doc="AdamW: added to the square root of the second moment")
    weight_decay: float = chz.field(default=0.0, doc="AdamW: decoupled weight decay")
    temperature: float = chz.field(default=1.0, doc="sampling temperature during training")
    eval_temperature: float | None = chz.field(
        default=None, doc="sampling temperature during evaluation, 0 for greedy; None uses the training temperature"
    )
    loss: Literal["importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo"] = chz.field(
        default="importance_sampling", doc="policy loss; docs/losses.md says when to use which"
    )
    clip_low: float = chz.field(
        default=0.2, doc="all losses but importance_sampling: lower clip of the ratio is 1 - clip_low"
    )
    clip_high: float = chz.field(
        default=0.2,
        doc="all losses but importance_sampling: upper clip of the ratio is 1 + clip_high; about 0.0004 for gspo",
    )
    dual_clip: float | None = chz.field(
        default=None,
        doc="ppo, decoupled_ppo: maximum weight of a token with negative advantage, such as 3; None disables it",
    )
    tis_cap: float | None = chz.field(
        default=None,
        doc="truncated importance sampling: cap on the trainer/sampler ratio as a weight, such as 2; None disables it",
    )
    icepop_low: float | None = chz.field(
        default=None, doc="mask tokens whose trainer/sampler ratio is lower, such as 0.5; None disables it"
    )
    icepop_high: float | None = chz.field(
        default=None, doc="mask tokens whose trainer/sampler ratio is higher, such as 5; None disables it"
    )
    normalisation: Normalisation = chz.field(
        default="constant",
        doc="divisor of a step's summed loss: constant (rollouts x normalisation_tokens), token_mean, "
        "sequence_mean, or token_sum (1)",
    )
    normalisation_tokens: int = chz.field(
        default=1000,
        doc="constant: trained tokens of a typical rollout; only sets the scale, to which AdamW is invariant",
    )
    reward: str = chz.field(
        default="binary",
        doc="reward function: binary, score, completion, efficiency, shaped, comprehensive, judge (binary, "
        "for tasks that a judge decides), or module:function",
    )
    judge_min_precision: float | None = chz.field(
        default=None,
        doc="refuse a judge unless the lower end of the 95 % interval of its calibrated precision is at least this; "
        "None only warns if there is no calibration",
    )
    judge_calibration: str | None = chz.field(
        default=None,
        doc="calibration file from recipes.calibrate_judge; None searches <log_dir>/judge_calibrations",
    )
    judge_force: bool = chz.field(default=False, doc="train with a judge that judge_min_precision would refuse")
    watch_goal: bool = chz.field(
        default=False,
        doc="check the goal on the device after every turn, for rewards that depend on when it was first reached",
    )
    advantages: AdvantageKind = chz.field(
        default="mean",
        doc="mean: centre rewards within the group; mean_std: also divide by the group's std; leave_one_out: "
        "subtract the mean of the others; batch_std: centre within the group, divide by the step's std",
    )
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="coefficient of the per-token KL penalty against the reference model, in the reward"
    )
    kl_loss_coef: float = chz.field(
        default=0.0, doc="coefficient of the KL divergence from the reference model, in the loss"
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps per training step, each on its share of the rollouts")
    grad_clip_norm: float = chz.field(default=1.0, doc="maximum gradient norm, 0 disables clipping")
    parity_limit: float = chz.field(
        default=0.05,
        doc="stop the run if the mean absolute difference of sampler and trainer log-probabilities exceeds this, nats",
    )
    max_steps_off_policy: int | None = chz.field(
        default=None,
        doc="None or 0: synchronous, on-policy training; k: asynchronous training with a policy lag of at most k steps",
    )
    force_untruncated: bool = chz.field(
        default=False, doc="max_steps_off_policy, replay_successes: allow a loss with an unbounded importance ratio"
    )
    sampling_seed: int | None = chz.field(
        default=None,
        doc="seed of all sampling, combined with step, group, rollout and turn; None samples without a seed",
    )
    adaptive_concurrency: bool = chz.field(
        default=True,
        doc="reduce the number of concurrent rollouts while vLLM's KV cache or the machine's memory is full",
    )

    # Engine
    base_url: str | None = chz.field(
        default=None, doc="URL of a running vLLM server (with runtime LoRA updating); None starts one"
    )
    server_port: int | None = chz.field(
        default=None, doc="port of the vLLM server that the run starts; None uses a free one"
    )
    max_model_len: int = chz.field(default=16384, doc="maximum tokens of prompt and response together")
    trainer_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="precision of the trainer; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    micro_batch_tokens: int = chz.field(default=16384, doc="maximum tokens of one forward pass of the trainer")
    gradient_checkpointing: bool = chz.field(default=False, doc="save trainer memory by recomputing activations")
    trainer_gpus: list[int] | None = chz.field(
        default=None, doc="GPUs of the trainer, such as 2,3; None uses those not used by vLLM; a single GPU is shared"
    )
    trainer_num_processes: int | None = chz.field(
        default=None,
        doc="data-parallel trainer processes; None is one per GPU of the trainer, one without GPUs",
    )
    trainer_sharding: Literal["none", "full"] = chz.field(
        default="none",
        doc="frozen weights in each trainer process: none: all of them; full: its shard of each layer (FSDP)",
    )
    vision_cache_gib: float = chz.field(
        default=2.0,
        doc="maximum main memory for cached screenshot features, so that each screenshot is encoded once per step",
    )

    # Logging
    log_path: str | None = chz.field(default=None, doc="folder of the run; None is <log_dir>/<run name>")
    log_dir: str | None = chz.field(default=None, doc="parent folder of run folders; None is ./runs")
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None disables it")
    wandb_name: str | None = chz.field(default=None, doc="Weights & Biases run name; None is the run's name")
    monitor: bool = chz.field(default=True, doc="start a Training Monitor for the run on the loopback address")
    monitor_port: int | None = chz.field(default=None, doc="port of that monitor; None is 8720, or a free one")
    monitor_base_url: str | None = chz.field(
        default=None, doc="address of a remote monitor to which the run is sent; also MONITOR_BASE_URL"
    )
    project_id: str | None = chz.field(default=None, doc="project on the remote monitor, for links; also PROJECT_ID")
    project_token: str | None = chz.field(
        default=None, doc="token of that project, never stored; preferably set as MONITOR_PROJECT_TOKEN"
    )
    eval_every: int = chz.field(default=10, doc="steps between evaluations, 0 evaluates only before and after training")
    save_every: int = chz.field(default=10, doc="steps between checkpoints, 0 saves only at the end")
    keep_checkpoints: int = chz.field(default=3, doc="number of newest checkpoints to keep on disk, 0 for all")
    keep_every: int = chz.field(default=0, doc="also keep checkpoints whose step is a multiple of this, 0 for none")
    num_groups_to_log: int = chz.field(default=1, doc="groups per step whose rewards are printed and logged")
    trace: bool = chz.field(
        default=False,
        doc="write each rollout to trace/ in the run's folder: screenshots with the actions drawn on them, "
        "and the text",
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="measure the KL divergence of each step's update (one more forward pass)"
    )
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = chz.field(
        default="ask", doc="what to do if the run's folder already holds a run"
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
