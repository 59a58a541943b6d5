# pyright: reportUnknownMemberType=false
"""What a step's losses say about it. Names are explained in `cua_rl/metrics.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cua_rl.config import LossConfig
from cua_rl.training.losses import TokenLoss


def loss_metrics(
    config: LossConfig, losses: Sequence[TokenLoss], training_logprobs: Tensor, sampling_logprobs: Tensor
) -> dict[str, float]:
    """Means and extremes over all trained tokens of a request, from the losses of its micro-batches."""
    total = _mean(torch.cat([loss.losses for loss in losses]))
    metrics = {"loss/total": total, "policy/entropy_estimate": _mean(-training_logprobs)}
    if config.name == "cross_entropy":
        return metrics | {"loss/cross_entropy": total}
    kl = _together([loss.kl for loss in losses])
    metrics["loss/policy"] = total if kl is None else total - config.kl_loss_coef * _mean(kl)
    shares = {
        "loss/kl_base": kl,
        "loss/kl_base_k1": _together([loss.kl_k1 for loss in losses]),
        "policy/clip_frac": _together([loss.clipped for loss in losses]),
        "policy/mask_frac": _together([loss.masked for loss in losses]),
    }
    metrics |= {name: _mean(values) for name, values in shares.items() if values is not None}
    return metrics | ratio_metrics(training_logprobs - sampling_logprobs)


def ratio_metrics(log_ratio: Tensor) -> dict[str, float]:
    """Of log training over sampling probability, [n]: how far the tokens are from on-policy."""
    log_ratio = log_ratio.detach().double()
    ratio = log_ratio.exp()
    median, high = torch.quantile(ratio, ratio.new_tensor([0.5, 0.99]))
    return {
        "policy/ratio_mean": _mean(ratio),
        "policy/ratio_p50": float(median),
        "policy/ratio_p99": float(high),
        "policy/ratio_max": float(ratio.max()),
        "policy/ratio_min": float(ratio.min()),
        "policy/ess_frac": effective_share(ratio),
        "policy/kl_sampling_training/mean": _mean(-log_ratio),
        "policy/kl_sampling_training/max": float(-log_ratio.min()),
        "policy/kl_sampling_training_k3/mean": _mean(torch.expm1(log_ratio) - log_ratio),
    }


def effective_share(weights: Tensor) -> float:
    """Effective sample size over sample size, (sum w)^2 / (n * sum w^2): 1 for equal weights, 1/n if one has it all."""
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _mean(values: Tensor) -> float:
    return float(values.detach().double().mean())
