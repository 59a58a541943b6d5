"""Settings as plain data, one chz class per part of the system. Secrets never live here: configuration is stored and
shown.
"""

from pathlib import Path
from typing import Literal

import chz

LossName = Literal["importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo", "cross_entropy"]
Normalisation = Literal["constant", "token_mean", "sequence_mean", "token_sum"]


@chz.chz
class LoraConfig:
    """Low-rank adapters on the language model's linear layers."""

    rank: int = chz.field(default=32, doc="rank of every adapter")
    alpha: int = chz.field(default=32, doc="LoRA scale: the update is multiplied by alpha / rank")
    seed: int = chz.field(default=0, doc="seed of the adapter's initial weights")


@chz.chz
class TrainerConfig:
    """The trainer process: which model, in which precision, how much at once."""

    model_path: Path = chz.field(doc="folder of a Qwen3-VL checkpoint with its tokenizer and preprocessor settings")
    lora: LoraConfig | None = chz.field(
        default_factory=LoraConfig, doc="LoRA settings; None trains all parameters (supervised)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="float32", doc="precision of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    micro_batch_tokens: int = chz.field(default=16384, doc="maximum tokens of one forward pass")
    gradient_checkpointing: bool = chz.field(default=False, doc="save memory by recomputing activations")
    num_processes: int = chz.field(default=1, doc="data-parallel processes, one per GPU")
    gpus: tuple[str, ...] = chz.field(default=(), doc="their GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    sharding: Literal["none", "full"] = chz.field(
        default="none",
        doc="frozen weights in each process: none: all of them; full: its shard of each layer (FSDP)",
    )
    vision_cache_gib: float = chz.field(
        default=2.0,
        doc="maximum main memory for cached screenshot features, so that each screenshot is encoded once per step",
    )
    seed: int = chz.field(default=0, doc="seed of everything random in the trainer")


@chz.chz
class LossConfig:
    """The policy loss and its constants: formulas and sources are in `docs/losses.md`."""

    name: LossName = chz.field(
        default="importance_sampling",
        doc="importance_sampling | ppo | cispo | gspo | decoupled_ppo | cross_entropy",
    )
    clip_low: float = chz.field(default=0.2, doc="lower clip of the ratio is 1 - clip_low")
    clip_high: float = chz.field(default=0.2, doc="upper clip of the ratio is 1 + clip_high")
    dual_clip: float | None = chz.field(
        default=None, doc="ppo, decoupled_ppo: maximum weight of a token with negative advantage; None disables it"
    )
    tis_cap: float | None = chz.field(
        default=None, doc="cap on the trainer/sampler ratio as a weight; None leaves the ratio inside the loss"
    )
    icepop_low: float | None = chz.field(
        default=None, doc="mask tokens whose trainer/sampler ratio is lower; None disables it"
    )
    icepop_high: float | None = chz.field(
        default=None, doc="mask tokens whose trainer/sampler ratio is higher; None disables it"
    )
    kl_loss_coef: float = chz.field(
        default=0.0, doc="coefficient of the KL divergence from the reference model, in the loss"
    )
    normalisation: Normalisation = chz.field(
        default="constant", doc="divisor of a step's summed loss (`token_weights` in cua_rl/rl/train_step.py)"
    )
    normalisation_tokens: int = chz.field(
        default=1000, doc="constant: trained tokens of a typical rollout, the same for every step"
    )
    temperature: float = chz.field(
        default=1.0, doc="the sampler's temperature, at which log-probabilities are computed"
    )

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

    learning_rate: float = chz.field(default=1e-5, doc="learning rate of this optimizer step")
    beta1: float = chz.field(default=0.9, doc="decay rate of the first moment")
    beta2: float = chz.field(default=0.95, doc="decay rate of the second moment")
    eps: float = chz.field(default=1e-8, doc="added to the square root of the second moment")
    weight_decay: float = chz.field(default=0.0, doc="decoupled weight decay")
    grad_clip_norm: float = chz.field(default=1.0, doc="maximum gradient norm, 0 disables clipping")


@chz.chz
class ServerConfig:
    """The vLLM server that the run starts and owns."""

    model_path: Path = chz.field(doc="folder of the base model")
    max_lora_rank: int = chz.field(
        default=32, doc="maximum adapter rank; vLLM supports 8, 16, 32, 64, 128, 256, 320, 512"
    )
    max_model_len: int = chz.field(default=4096, doc="maximum tokens of prompt and response together")
    max_num_seqs: int = chz.field(default=128, doc="maximum batch size, requests")
    max_images: int = chz.field(default=32, doc="maximum images per prompt")
    max_adapters: int = chz.field(default=4, doc="maximum number of loaded adapters")
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(default="auto", doc="precision; auto is the checkpoint's")
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for the KV cache on CPU, GiB")
    gpu_memory_utilization: float = chz.field(default=0.85, doc="fraction of GPU memory for vLLM")
    gpus: tuple[str, ...] = chz.field(default=(), doc="its GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    tensor_parallel: int = chz.field(default=1, doc="GPUs per copy of the model")
    data_parallel: int = chz.field(default=1, doc="copies of the model, each on its own GPUs")
    port: int | None = chz.field(default=None, doc="port on the loopback address; None uses a free one")
    start_timeout_s: float = chz.field(default=300.0, doc="limit for the start of the server, seconds")
