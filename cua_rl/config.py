"""Settings as plain data, one chz class per part of the system. Secrets never live here: configuration is stored and
shown.
"""

from pathlib import Path
from typing import Literal

import chz

from cua_rl.families import LoraModule
from cua_rl.settings import setting

LossName = Literal["importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo", "cross_entropy"]
Sharding = Literal["none", "full", "hybrid", "offload"]
Loader = Literal["hf", "unsloth"]
Kernels = Literal["torch", "compiled"]
Normalisation = Literal["constant", "token_mean", "sequence_mean", "token_sum"]


@chz.chz
class LoraConfig:
    """Low-rank adapters on linear layers."""

    rank: int = setting(32, "rank of every adapter")
    alpha: int = setting(32, "LoRA scale: the update is multiplied by alpha / rank")
    seed: int = setting(0, "seed of the adapter's initial weights")
    modules: tuple[LoraModule, ...] = setting(("language",), "parts of the model that get an adapter")


@chz.chz
class TrainerConfig:
    """The trainer process: which model, in which precision, how much at once."""

    model_path: Path = chz.field(doc="folder of a Qwen3-VL checkpoint with its tokenizer and preprocessor settings")
    lora: LoraConfig | None = setting(doc="LoRA settings; None trains all parameters (supervised)", factory=LoraConfig)
    loader: Loader = setting("hf", "what loads the model: hf (Transformers) or unsloth")
    kernels: Kernels = setting("torch", "norms, rotations and SwiGLU of the language model: torch or compiled")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "float32", "precision of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    micro_batch_tokens: int = setting(16384, "maximum tokens of one forward pass")
    gradient_checkpointing: bool = setting(False, "save memory by recomputing activations")
    keeps_attention: bool = setting(False, "with gradient_checkpointing, keep the results of attention all the same")
    num_processes: int = setting(1, "data-parallel processes, one per GPU")
    gpus: tuple[str, ...] = setting((), "their GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    sharding: Sharding = setting(
        "none",
        "weights on each GPU: none: all of them; full: its shard of each layer (FSDP); hybrid: the same, but "
        "each node holds all shards; offload: one layer at a time, from main memory",
    )
    memory_fraction: float = setting(1.0, "share of its GPU's memory that a process may allocate")
    context_parallel: int = setting(1, "ranks that share each row, for sequences too long for one")
    max_pixels: int | None = setting(None, "maximum pixels of a screenshot as the model sees it; None is the model's")
    vision_cache_gib: float = setting(
        2.0, "maximum main memory for cached screenshot features, so that each screenshot is encoded once per step"
    )
    seed: int = setting(0, "seed of everything random in the trainer")
    max_restarts: int = setting(0, "starts after deaths of a trainer process without an optimizer step in between")
    address: str | None = setting(None, "where rank 0 listens on another host, such as 10.0.0.1:29400")


@chz.chz
class LossConfig:
    """The policy loss and its constants (docs/losses.md: formulas, sources, when to use which)."""

    name: LossName = setting(
        "importance_sampling",
        "policy loss (python -m cua_rl.recipes.sft imitates)",
        for_group=True,
        not_offered=("cross_entropy",),
    )
    clip_low: float = setting(
        0.2, "all losses but importance_sampling: lower clip of the ratio is 1 - clip_low", within=(0.0, 1.0)
    )
    clip_high: float = setting(
        0.2,
        "all losses but importance_sampling: upper clip of the ratio is 1 + clip_high",
        within=(0.0, 10.0),
    )
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
    beta1: float = setting(0.9, "decay rate of the first moment", within=(0.0, 0.9999))
    beta2: float = setting(0.95, "decay rate of the second moment", within=(0.0, 0.99999))
    eps: float = setting(1e-8, "added to the square root of the second moment", within=(0.0, 1.0))
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0.0)
    grad_clip_norm: float = setting(1.0, "maximum gradient norm, 0 disables clipping", at_least=0.0)


@chz.chz
class ServerConfig:
    """The vLLM server that the run starts and owns."""

    model_path: Path = chz.field(doc="folder of the base model")
    max_lora_rank: int = setting(32, "maximum adapter rank; vLLM supports 8, 16, 32, 64, 128, 256, 320, 512")
    max_model_len: int = setting(4096, "maximum tokens of prompt and response together")
    max_num_seqs: int = setting(128, "maximum batch size, requests")
    max_images: int = setting(32, "maximum images per prompt")
    max_pixels: int | None = setting(None, "maximum pixels of an image as the model sees it; None is the model's")
    image_cache_gib: float = setting(4.0, "maximum main memory for processed images, so that none is processed again")
    max_adapters: int = setting(4, "maximum number of loaded adapters")
    adapts_vision: bool = setting(False, "apply adapters to vision tower and merger, too")
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "precision; auto is the checkpoint's")
    kv_cache_gib: float = setting(1.0, "memory for the KV cache on CPU, GiB")
    gpu_memory_utilization: float = setting(0.85, "fraction of GPU memory for vLLM")
    gpus: tuple[str, ...] = setting((), "its GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    tensor_parallel: int = setting(1, "GPUs that hold the model together")
    vllm_args: tuple[str, ...] = setting((), "more options of vLLM's server; those of the run override them")
    host: str = setting("127.0.0.1", "address to listen on, beside a port")
    port: int | None = setting(None, "port to listen on; None listens on a Unix socket")
    adapter_folder: Path | None = setting(
        None, "folder for adapters that are sent to the server; None loads them from the paths of the run"
    )
    start_timeout_s: float = setting(300.0, "limit for the start of the server, seconds")
