# pyright: reportUnknownMemberType=false
"""Metrics of a request's losses; `cua_rl/metrics.py` defines their names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cua_rl.config import LossConfig
from cua_rl.training.losses import TokenLoss


def loss_metrics(
    config: LossConfig, losses: Sequence[TokenLoss], training_logprobs: Tensor, sampling_logprobs: Tensor
) -> dict[str, float]:
    """Means and extremes over all trained tokens of a request, from its micro-batches' losses."""
    total = _mean(torch.cat([loss.losses for loss in losses]))
    metrics = {"loss/total": total, "policy/entropy_estimate": _mean(-training_logprobs)}
    if config.name == "cross_entropy":
        return metrics | {"loss/cross_entropy": total}
    parts = {
        "loss/kl_base": [loss.kl for loss in losses],
        "loss/kl_base_k1": [loss.kl_k1 for loss in losses],
        "policy/clip_frac": [loss.clipped for loss in losses],
        "policy/mask_frac": [loss.masked for loss in losses],
    }
    present = {name: [part for part in values if part is not None] for name, values in parts.items()}
    metrics |= {name: _mean(torch.cat(values)) for name, values in present.items() if values}
    metrics["loss/policy"] = total - config.kl_loss_coef * metrics.get("loss/kl_base", 0.0)
    return metrics | ratio_metrics(training_logprobs - sampling_logprobs)


def ratio_metrics(log_ratio: Tensor) -> dict[str, float]:
    """How far off-policy the tokens are, from log(training / sampling probability) [n]."""
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


def _mean(values: Tensor) -> float:
    return float(values.detach().double().mean())
