# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Metrics of the trainer: its work, speed and memory per step, and those of losses. `cua_rl/metrics.py` defines names.

FLOPs are counted from shapes, two per multiply-add of a matrix product; element-wise operations are not counted.
Recomputed activations (gradient checkpointing) add time, not FLOPs. A frozen matrix costs one product forward and one
backward (the gradient of its input), a trained one two backward.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cua_rl.host import system
from cua_rl.host.gpu_peaks import data_sheet_tflop_per_s
from cua_rl.metrics import merge_metrics
from cua_rl.training.batching import Grid
from cua_rl.training.config import LossConfig
from cua_rl.training.loss_terms import TokenLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Multiply-adds of a model's matrix products."""

    language: int
    """Per token, in the decoder layers' linear maps; of the last layer, in those to keys and values."""
    language_last: int
    """Per scored token, in the last layer's other linear maps."""
    language_attention: int
    """Per pair of tokens that see each other, in one layer: heads * head_dim, twice (scores and values)."""
    num_attentions: int
    """Layers whose tokens see each other; the state of linear attention is not counted, under 1 % of its layer."""
    lora: int
    """Per token, as `language`."""
    lora_last: int
    """Per scored token, as `language_last`."""
    head: int
    """Per scored token."""
    vision: int
    """Per patch, and in `vision_lora` those of its adapter."""
    vision_lora: int
    vision_attention: int
    """Per pair of patches of one image, in layers that see all of it; `window_attention` in those that see a window."""
    window_attention: int
    window_patches: int
    """Patches along a side of a window."""
    merger: int
    """Per image token: the merger and every deepstack merger, and in `merger_lora` those of their adapter."""
    merger_lora: int
    merge_area: int
    """Patches per image token."""


def measure_shape(base: Any) -> ModelShape:
    """The shape of a model, with or without a LoRA adapter; of the experts in a layer, as many as a token visits.

    Adapters that are not in use, which need no gradient, do not count.
    """
    text, vision = base.config.text_config, base.config.vision_config
    matrices = {
        name: parameter.numel()
        for name, parameter in base.named_parameters()
        if parameter.ndim > 1 and (parameter.requires_grad or "lora_" not in name)
    }
    for name, parameter in base.named_parameters():
        if ".experts." in name:  # [experts, out, in]
            matrices[name] = matrices[name] // len(parameter) * text.num_experts_per_tok

    def total(pattern: str) -> int:
        return sum(count for name, count in matrices.items() if re.search(pattern, name))

    num_windowed = vision.depth - len(vision.to_dict().get("fullatt_block_indexes", range(vision.depth)))
    attentions = [layer.self_attn for layer in base.model.language_model.layers if hasattr(layer, "self_attn")]
    last = rf"layers\.{text.num_hidden_layers - 1}\.(self_attn\.[qo]_proj|mlp)\."
    frozen, adapter = rf"language_model\.(?!{last})layers\.(?!.*lora_)", rf"language_model\.(?!{last}).*lora_[AB]\."
    return ModelShape(
        language=total(frozen),
        language_last=total(rf"language_model\.{last}(?!.*lora_)"),
        language_attention=2 * text.num_attention_heads * attentions[-1].head_dim,
        num_attentions=len(attentions),
        lora=total(adapter),
        lora_last=total(rf"language_model\.{last}.*lora_[AB]\."),
        head=base.lm_head.weight.numel(),
        vision=total(r"visual\.(blocks|patch_embed)(?!.*lora_)"),
        vision_lora=total(r"visual\.blocks.*lora_[AB]\."),
        vision_attention=2 * vision.hidden_size * (vision.depth - num_windowed),
        window_attention=2 * vision.hidden_size * num_windowed,
        window_patches=vision.window_size // vision.patch_size if num_windowed else 1,
        merger=total(r"visual\.(merger|deepstack_merger)(?!.*lora_)"),
        merger_lora=total(r"visual\.(merger|deepstack_merger).*lora_[AB]\."),
        merge_area=vision.spatial_merge_size**2,
    )


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts of one step; `take` reads and clears them."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    trains_base: bool
    """Everything is trained, not only an adapter."""
    held_bytes: int
    """Memory of the parameters that this process holds."""
    _counts: Counter[str] = field(default_factory=Counter[str])
    _flops: Counter[str] = field(default_factory=Counter[str])
    _busy_s: float = 0.0
    _peak_flops_per_s: float | None = None

    def add_sequences(
        self,
        lengths: Sequence[int],
        num_shared: Sequence[int],
        predictors: Sequence[torch.Tensor],
        *,
        backward: bool,
        adapter: bool,
    ) -> None:
        """Count a pass of the language model over packed sequences, and of their `predictors` through the head.

        `num_shared` are the tokens before each that an earlier one has.
        """
        shape, num_tokens, num_scored = self.shape, sum(lengths), sum(map(len, predictors))
        pairs = sum(own * shared + own * (own + 1) // 2 for own, shared in zip(lengths, num_shared, strict=True))
        pairs *= shape.num_attentions - 1
        pairs += sum(int((places + 1 + shared).sum()) for places, shared in zip(predictors, num_shared, strict=True))
        frozen, trained = (2, 3) if backward else (1, 1)
        base = trained if self.trains_base else frozen
        linear = shape.language * num_tokens + shape.language_last * num_scored
        self._flops["language"] += 2 * (linear * base + shape.language_attention * pairs * trained)
        self._flops["head"] += 2 * shape.head * num_scored * base
        if adapter:
            self._flops["lora"] += 2 * (shape.lora * num_tokens + shape.lora_last * num_scored) * trained
        self._counts["tokens"] += num_tokens
        self._counts["shared_tokens"] += sum(num_shared)
        if backward:
            self._counts["trained_tokens"] += num_scored

    def add_encoded_images(self, grids: Iterable[Grid], *, backward: bool) -> None:
        """Count images that pass through the vision tower."""
        shape, window, trained = self.shape, self.shape.window_patches, 3 if backward else 1
        merger = trained if self.trains_base else min(trained, 2)
        reaches_tower = self.trains_base or shape.vision_lora > 0
        tower, attention = (merger, trained) if reaches_tower else (1, 1)  # below the first adapter, no gradients
        for frames, height, width in grids:
            patches = frames * height * width
            tokens = patches // shape.merge_area
            pairs = shape.vision_attention * patches**2
            in_windows = [side // window * window**2 + (side % window) ** 2 for side in (height, width)]
            pairs += shape.window_attention * frames * math.prod(in_windows)
            products = tower * shape.vision * patches + attention * pairs
            self._flops["vision"] += 2 * (products + merger * shape.merger * tokens)
            self._flops["lora"] += 2 * trained * (shape.vision_lora * patches + shape.merger_lora * tokens)
            self._counts["encoded_images"] += 1

    def count(self, name: str, number: int) -> None:
        """Count images whose features came from the cache, or requests that were repeated because memory ran out."""
        self._counts[name] += number

    @property
    def num_encoded_images(self) -> int:
        """Images that passed through the vision tower since the last `take`."""
        return self._counts["encoded_images"]

    @contextmanager
    def busy(self) -> Generator[None]:
        """Count the block's time as busy."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Metrics since the last call, by metric name."""
        if self._peak_flops_per_s is None:
            self._peak_flops_per_s = measure_matmul_peak(self.device, self.dtype)
        flops_per_s = self._flops.total() / self._busy_s if self._busy_s else 0.0
        counts = ("tokens", "shared_tokens", "trained_tokens", "encoded_images", "reused_images", "memory_retries")
        metrics = {f"trainer/{name}": float(self._counts[name]) for name in counts}
        metrics |= {
            f"trainer/{name}_tflop": self._flops[name] / 1e12 for name in ("language", "vision", "lora", "head")
        }
        rss_gib = system.resident_bytes() / 2**30
        metrics |= {
            "trainer/padding_tokens": 0.0,  # rows are packed sequences
            "trainer/busy_s": self._busy_s,
            "trainer/tflop_per_s": flops_per_s / 1e12,
            "trainer/matmul_frac": flops_per_s / self._peak_flops_per_s,
            "trainer/parameters_gib": self.held_bytes / 2**30,
            "trainer/peak_rss_gib": max(system.peak_resident_bytes() / 2**30, rss_gib),
            "trainer/rss_gib": rss_gib,
        }
        if self.device.type == "cuda":
            stated = data_sheet_tflop_per_s(torch.cuda.get_device_name(self.device))
            if stated is not None:
                metrics["trainer/mfu_frac"] = flops_per_s / 1e12 / stated
            metrics["trainer/peak_cuda_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            metrics["trainer/peak_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        self._counts.clear()
        self._flops.clear()
        self._busy_s = 0.0
        return metrics


def held_bytes(model: nn.Module) -> int:
    """Memory of the parameters that this process holds: of sharded ones, its shard."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in model.parameters()
    )


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, *, num_tries: int = 3) -> float:
    """FLOP/s of one large square matrix product, the best of several tries: the device's practical limit."""
    size = 8192 if device.type == "cuda" else 1024
    seconds: list[float] = []
    with torch.random.fork_rng(), torch.no_grad():
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(num_tries + 1):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            nn.functional.linear(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds[1:])  # the first one warms up


def loss_metrics(
    config: LossConfig,
    losses: Sequence[TokenLoss],
    training_logprobs: Tensor,
    sampling_logprobs: Tensor,
    weights: Tensor,
) -> dict[str, float]:
    """Means and extremes over all trained tokens of a request, from its micro-batches' losses.

    `weights` [n] are those of tokens in the minimised sum.
    """
    values = torch.cat([loss.losses for loss in losses]).double()
    mean, total = _mean(values), float(values @ weights.double())
    if config.name == "cross_entropy":
        return {"loss/total": total, "loss/cross_entropy": mean}
    parts = {
        "loss/kl_base": [loss.kl for loss in losses],
        "loss/kl_base_k1": [loss.kl_k1 for loss in losses],
        "policy/clip_frac": [loss.clipped for loss in losses],
        "policy/mask_frac": [loss.masked for loss in losses],
    }
    present = {name: [part for part in values if part is not None] for name, values in parts.items()}
    metrics = {name: _mean(torch.cat(values)) for name, values in present.items() if values}
    of_policy = {
        "loss/total": total,
        "loss/policy": mean - config.kl_loss_coef * metrics.get("loss/kl_base", 0.0),
        "policy/trained_entropy_estimate": _mean(-training_logprobs),
    }
    return merge_metrics(metrics, of_policy, ratio_metrics(training_logprobs - sampling_logprobs))


def ratio_metrics(log_ratio: Tensor) -> dict[str, float]:
    """Off-policy metrics of tokens, from log(training / sampling probability) [n]."""
    log_ratio = log_ratio.detach().double()
    ratio = log_ratio.exp()
    median, high = quantiles(ratio, 0.5, 0.99)
    return {
        "policy/ratio_mean": _mean(ratio),
        "policy/ratio_p50": median,
        "policy/ratio_p99": high,
        "policy/ratio_max": float(ratio.max()),
        "policy/ratio_min": float(ratio.min()),
        "policy/ess_frac": effective_share(ratio),
        "policy/kl_sampling_training/mean": _mean(-log_ratio),
        "policy/kl_sampling_training/max": float(-log_ratio.min()),
        "policy/kl_sampling_training_k3/mean": _mean(torch.expm1(log_ratio) - log_ratio),
    }


def quantiles(values: Tensor, *shares: float) -> list[float]:
    """Quantiles of [n] with linear interpolation; `torch.quantile` refuses more than 2^24 values."""
    ordered = values.sort().values
    places = [share * (len(values) - 1) for share in shares]
    return [float(ordered[int(p)].lerp(ordered[math.ceil(p)], p - int(p))) for p in places]


def effective_share(weights: Tensor) -> float:
    """Effective sample size over sample size, (sum w)^2 / (n * sum w^2): 1 for equal weights, 1/n if one has it all."""
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def _mean(values: Tensor) -> float:
    return float(values.detach().double().mean())
