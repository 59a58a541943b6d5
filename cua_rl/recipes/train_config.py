"""What a training run can be told. The embedded demo presets some of it."""

from typing import Literal

import chz

from cua_rl.rl.advantages import AdvantageKind
from cua_rl.rl.train_step import Schedule

Tasks = dict[str, object] | list[dict[str, object]]


@chz.chz
class CLIConfig:
    """Train a vision computer-use agent with group-relative policy gradients."""

    # Model
    model_name: str | None = chz.field(
        default=None,
        doc="folder or hub id of a Qwen3-VL model; None is the tiny model of this package (the embedded demo)",
    )
    lora_rank: int = chz.field(default=32, doc="rank of the LoRA adapter")
    lora_alpha: int = chz.field(default=32, doc="the adapter's update is scaled by lora_alpha / lora_rank")
    renderer_name: str | None = chz.field(
        default=None, doc="how conversations become tokens; None detects it from the model"
    )
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="folder weights/<step> of an earlier run: start from its weights with a fresh optimizer"
    )

    # Devices and agent
    device: Literal["simulator"] = chz.field(default="simulator", doc="what tasks run on: the embedded phone simulator")
    box_type: Literal["android", "linux"] = chz.field(default="android", doc="kind of device; the simulator is android")
    max_turns: int = chz.field(default=20, doc="most turns of a rollout; a task may allow fewer")
    max_concurrent_rollouts: int = chz.field(default=128, doc="most devices in use at a time")
    screen_scale: int = chz.field(default=1, doc="simulator: screen of 192x320 pixels times this")
    gbox_api_key: str | None = chz.field(
        default=None, doc="key of GBox devices; not used by embedded devices, never stored"
    )
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
    eval_attempts: int = chz.field(default=1, doc="rollouts of each held-out task instance, for pass@k")
    max_concurrent_eval_rollouts: int | None = chz.field(
        default=None, doc="most devices in use at a time in an evaluation; None is max_concurrent_rollouts"
    )
    seed: int = chz.field(default=0, doc="seed of task order, task instances and initial adapter weights")

    # Training
    max_steps: int = chz.field(default=100, doc="training steps of the run")
    group_size: int = chz.field(default=4, doc="rollouts of one task instance that are compared with each other")
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
        doc="where a whole group fails, train on a stored success of its task too (off-policy: loss=ppo is safer)",
    )
    replay_capacity: int = chz.field(default=2, doc="replay_successes: most successes stored per task")
    learning_rate: float = chz.field(default=1e-5, doc="AdamW step size; 0 trains nothing and is useful as a control")
    learning_rate_schedule: Schedule = chz.field(
        default="constant", doc="constant, or linear: falling to a twentieth at the last step"
    )
    max_tokens: int = chz.field(default=2048, doc="most tokens of one answer")
    temperature: float = chz.field(default=1.0, doc="sampling temperature of training")
    eval_temperature: float | None = chz.field(
        default=None, doc="sampling temperature of evaluation, 0 for greedy; None is the one of training"
    )
    loss: Literal["importance_sampling", "ppo"] = chz.field(default="importance_sampling", doc="policy loss")
    clip_low: float = chz.field(default=0.2, doc="ppo: the ratio is clipped below at 1 - clip_low")
    clip_high: float = chz.field(default=0.2, doc="ppo: the ratio is clipped above at 1 + clip_high")
    reward: str = chz.field(
        default="binary",
        doc="what a rollout is worth: binary, completion, efficiency, shaped, comprehensive, or module:function",
    )
    watch_goal: bool = chz.field(
        default=False, doc="read the goal from the device after every turn too, for rewards that ask when it first held"
    )
    advantages: AdvantageKind = chz.field(
        default="mean", doc="mean: centre rewards in the group; mean_std: also divide by std"
    )
    kl_penalty_coef: float = chz.field(default=0.0, doc="weight of the KL penalty against the base model")
    num_substeps: int = chz.field(default=1, doc="optimizer steps per training step")
    grad_clip_norm: float = chz.field(default=1.0, doc="largest gradient norm, 0 for none")
    parity_limit: float = chz.field(
        default=0.05,
        doc="largest mean difference of sampler and trainer log-probabilities, nats; above it the run stops",
    )
    max_steps_off_policy: int | None = chz.field(default=None, doc="None or 0: synchronous, on-policy training")

    # Engine
    base_url: str | None = chz.field(
        default=None, doc="URL of a vLLM server that is already running (with LoRA updating on); None starts one"
    )
    server_port: int | None = chz.field(
        default=None, doc="port of the vLLM server that the run starts; None takes a free one"
    )
    gateway_port: int | None = chz.field(
        default=None, doc="port on which agents outside this process reach the gateway"
    )
    max_model_len: int = chz.field(default=16384, doc="longest prompt plus answer, tokens")
    max_num_seqs: int = chz.field(default=128, doc="most requests that vLLM handles in one batch")
    gpu_memory_utilization: float = chz.field(default=0.85, doc="share of the GPU's memory that vLLM may take")
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for vLLM's KV cache on CPU, GiB")
    trainer_dtype: Literal["float32", "bfloat16"] = chz.field(default="float32", doc="precision of the trainer")
    micro_batch_tokens: int = chz.field(default=16384, doc="most tokens of one forward pass of the trainer")
    gradient_checkpointing: bool = chz.field(default=False, doc="save trainer memory by recomputing activations")

    # Logging
    log_path: str | None = chz.field(default=None, doc="folder of the run; None is <log_dir>/<run name>")
    log_dir: str | None = chz.field(default=None, doc="folder in which the run's folder is made; None is ./runs")
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None does not use it")
    wandb_name: str | None = chz.field(default=None, doc="Weights & Biases run name; None is the run's name")
    eval_every: int = chz.field(default=10, doc="evaluate every so many steps, 0 only before and after")
    save_every: int = chz.field(default=10, doc="save a checkpoint every so many steps, 0 only at the end")
    keep_checkpoints: int = chz.field(default=3, doc="newest checkpoints that stay on disk, 0 for all")
    keep_every: int = chz.field(
        default=0, doc="checkpoints whose step is a multiple of this stay on disk too, 0 for none"
    )
    num_groups_to_log: int = chz.field(default=1, doc="groups per step whose rewards are written to the log")
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
        for name, smallest in _SMALLEST.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name}: expected at least {smallest}, got {value!r}; set {name}={smallest} or more")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low < value <= high:
                raise ValueError(
                    f"{name}: expected a number above {low} and at most {high}, got {value!r}; change {name}"
                )

    @chz.validate
    def _groups_can_be_compared(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size: expected at least 2, because advantages compare the rollouts of a group, got "
                f"{self.group_size!r}; set group_size=2 or more"
            )

    @chz.validate
    def _is_synchronous(self) -> None:
        if self.max_steps_off_policy:
            raise ValueError(
                f"max_steps_off_policy: expected None or 0 (training is synchronous), got "
                f"{self.max_steps_off_policy!r}; leave it out"
            )


_SMALLEST = {
    "lora_rank": 1,
    "lora_alpha": 1,
    "max_turns": 1,
    "max_concurrent_rollouts": 1,
    "screen_scale": 1,
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
    "max_tokens": 1,
    "kl_penalty_coef": 0.0,
    "num_substeps": 1,
    "grad_clip_norm": 0.0,
    "parity_limit": 0.0,
    "max_model_len": 64,
    "max_num_seqs": 1,
    "micro_batch_tokens": 64,
    "eval_every": 0,
    "save_every": 0,
    "keep_checkpoints": 0,
    "keep_every": 0,
    "num_groups_to_log": 0,
}
_RANGES = {
    "temperature": (0.0, 2.0),
    "clip_low": (0.0, 1.0),
    "clip_high": (0.0, 10.0),
    "gpu_memory_utilization": (0.0, 1.0),
    "kv_cache_gib": (0.0, 4096.0),
    "server_port": (0, 65535),
    "gateway_port": (0, 65535),
}

EMBEDDED_DEMO: dict[str, object] = {
    "tasks": {"source_type": "demo_training", "tags": ["demo"]},
    "eval_tasks": {"source_type": "demo_eval", "tags": ["demo"]},
    "lora_rank": 16,
    "group_size": 8,
    "groups_per_batch": 16,
    "learning_rate": 2e-3,
    "learning_rate_schedule": "linear",
    "advantages": "mean_std",
    "max_steps": 48,
    "eval_temperature": 0.5,
    "max_tokens": 48,
    "max_model_len": 2048,
    "eval_every": 0,
    "parity_limit": 0.02,
}
"""Settings of the embedded demo, used where no model is named: the tiny model learns in minutes on two cores."""
