"""Settings as plain data, one chz class per part of the system. Secrets never live here: configuration is stored and
shown.
"""

from pathlib import Path
from typing import Literal

import chz

LossName = Literal["importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo", "cross_entropy"]
Normalisation = Literal["constant", "token_mean", "sequence_mean", "token_sum"]
KlKind = Literal["k1", "k2", "k3"]


@chz.chz
class LoraConfig:
    """Low-rank adapters on the language model's linear layers."""

    rank: int = chz.field(default=32, doc="rank of every adapter")
    alpha: int = chz.field(default=32, doc="scale: the update is multiplied by alpha / rank")
    seed: int = chz.field(default=0, doc="seed of the adapter's initial weights")


@chz.chz
class TrainerConfig:
    """The trainer process: which model, in which precision, how much at once."""

    model_path: Path = chz.field(doc="folder of a Qwen3-VL checkpoint with its tokenizer and preprocessor settings")
    lora: LoraConfig | None = chz.field(default_factory=LoraConfig, doc="None trains every parameter (supervised)")
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="float32", doc="precision of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    micro_batch_tokens: int = chz.field(default=16384, doc="most tokens of one forward pass")
    gradient_checkpointing: bool = chz.field(default=False, doc="save memory by recomputing activations")
    num_processes: int = chz.field(default=1, doc="processes that share the work of every step, one per GPU")
    gpus: tuple[str, ...] = chz.field(default=(), doc="their GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    sharding: Literal["none", "full"] = chz.field(
        default="none",
        doc="what each of several processes holds of the frozen model: none: all of it; full: its share of each layer",
    )
    vision_cache_gib: float = chz.field(
        default=2.0, doc="most main memory for screenshots' features, so that each is encoded once per step"
    )
    seed: int = chz.field(default=0, doc="seed of everything random in the trainer")


@chz.chz
class LossConfig:
    """Which policy loss, and its constants: formulas and sources are in `docs/losses.md`."""

    name: LossName = chz.field(
        default="importance_sampling",
        doc="importance_sampling | ppo | cispo | gspo | decoupled_ppo | cross_entropy",
    )
    clip_low: float = chz.field(default=0.2, doc="the ratio is clipped below at 1 - clip_low")
    clip_high: float = chz.field(default=0.2, doc="the ratio is clipped above at 1 + clip_high")
    dual_clip: float | None = chz.field(
        default=None, doc="ppo, decoupled_ppo: a token of negative advantage weighs at most this much; None is no limit"
    )
    tis_cap: float | None = chz.field(
        default=None, doc="the weight of trainer over sampler is truncated here; None leaves it inside the loss's ratio"
    )
    icepop_low: float | None = chz.field(
        default=None, doc="tokens whose trainer/sampler ratio is below this are masked; None masks none"
    )
    icepop_high: float | None = chz.field(
        default=None, doc="tokens whose trainer/sampler ratio is above this are masked; None masks none"
    )
    kl_loss_coef: float = chz.field(
        default=0.0, doc="weight of the KL divergence from what training started from in the loss"
    )
    kl_loss_kind: KlKind = chz.field(default="k3", doc="how that divergence is estimated: k1 | k2 | k3")
    normalisation: Normalisation = chz.field(
        default="constant", doc="what a training step divides its summed loss by (cua_rl/rl/normalisation.py)"
    )
    normalisation_tokens: int = chz.field(
        default=1000, doc="constant: the sampled tokens of a typical rollout, whatever this step's rollouts have"
    )
    temperature: float = chz.field(default=1.0, doc="the sampler's temperature; log-probabilities are taken at it")

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

    learning_rate: float = chz.field(default=1e-5, doc="step size of this optimizer step")
    beta1: float = chz.field(default=0.9, doc="decay of the gradient's mean")
    beta2: float = chz.field(default=0.95, doc="decay of the gradient's square")
    eps: float = chz.field(default=1e-8, doc="added to the root of the second moment")
    weight_decay: float = chz.field(default=0.0, doc="decoupled weight decay")
    grad_clip_norm: float = chz.field(default=1.0, doc="largest gradient norm, 0 for none")


@chz.chz
class ServerConfig:
    """The vLLM server that the run starts and owns."""

    model_path: Path = chz.field(doc="folder of the base model")
    max_lora_rank: int = chz.field(default=32, doc="largest adapter rank; vLLM knows 8, 16, 32, 64, 128, 256, 320, 512")
    max_model_len: int = chz.field(default=4096, doc="longest prompt plus answer, tokens")
    max_num_seqs: int = chz.field(default=128, doc="most requests in one batch")
    max_images: int = chz.field(default=32, doc="most images in one prompt")
    max_adapters: int = chz.field(default=4, doc="most adapters loaded at a time")
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(default="auto", doc="precision; auto is the checkpoint's")
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for the KV cache on CPU, GiB")
    gpu_memory_utilization: float = chz.field(default=0.85, doc="share of the GPU's memory that vLLM may take")
    gpus: tuple[str, ...] = chz.field(default=(), doc="its GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    tensor_parallel: int = chz.field(default=1, doc="GPUs that hold one copy of the model together")
    data_parallel: int = chz.field(default=1, doc="copies of the model, each on GPUs of its own")
    port: int | None = chz.field(default=None, doc="port to listen on, loopback only; None takes a free one")
    start_timeout_s: float = chz.field(default=300.0, doc="longest wait until the server answers, seconds")
