# pyright: reportUnknownMemberType=false
"""Policy losses: pure functions on flat vectors over trained tokens.

`n` is the number of trained tokens; every vector is float32 of shape [n]. `training_logprobs` carry the gradient;
`sampling_logprobs` come from the server that drew the tokens. Losses are per token and the trainer sums them: it
divides the summed gradient by the number of trained tokens when it steps. So how tokens fall into micro-batches changes
nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cua_rl.config import LossConfig
from cua_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss per token, and what to report of it."""

    losses: Tensor  # [n], differentiable
    ratio: Tensor | None = None  # [n], training over sampling probability; None for cross_entropy
    clipped: Tensor | None = None  # [n] bool: the clip took the token's gradient away; None if nothing clips

    def detach(self) -> "TokenLoss":
        """The same without the graph behind it."""
        return TokenLoss(losses=self.losses.detach(), ratio=self.ratio, clipped=self.clipped)


def token_losses(
    config: LossConfig, training_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor
) -> TokenLoss:
    """The configured loss of every trained token."""
    match config.name:
        case "importance_sampling":
            return importance_sampling(training_logprobs, sampling_logprobs, advantages)
        case "ppo":
            return ppo(training_logprobs, sampling_logprobs, advantages, config.clip_low, config.clip_high)
        case "cross_entropy":
            return cross_entropy(training_logprobs)


def importance_sampling(training_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """- ratio * advantage; on policy (ratio 1) its gradient is the policy gradient - advantage * grad log p."""
    ratio = torch.exp(training_logprobs - sampling_logprobs)
    return TokenLoss(losses=-ratio * advantages, ratio=ratio.detach())


def ppo(
    training_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """- min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage), as in arXiv 1707.06347."""
    ratio = torch.exp(training_logprobs - sampling_logprobs)
    free = ratio * advantages
    held = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return TokenLoss(losses=-torch.minimum(free, held), ratio=ratio.detach(), clipped=(held < free).detach())


def cross_entropy(training_logprobs: Tensor) -> TokenLoss:
    """- log p of every token on the mask, weight 1; advantages and sampling log-probabilities are not looked at."""
    return TokenLoss(losses=-training_logprobs)


def check_loss_config(config: LossConfig) -> None:
    """Raises `ConfigError` for constants that no loss can work with."""
    if not config.temperature > 0.0:
        raise ConfigError(f"expected loss.temperature > 0, got {config.temperature!r}: give the sampler's temperature")
    if config.clip_low < 0.0 or config.clip_high < 0.0:
        raise ConfigError(f"expected clip_low, clip_high >= 0, got {config.clip_low!r}, {config.clip_high!r}")


def loss_metrics(
    config: LossConfig, loss: TokenLoss, training_logprobs: Tensor, sampling_logprobs: Tensor
) -> dict[str, float]:
    """Means and extremes over all trained tokens of a request; names as in `cua_rl/metrics.py`."""
    total = _mean(loss.losses)
    metrics = {"loss/total": total, "policy/entropy_estimate": _mean(-training_logprobs)}
    metrics["loss/cross_entropy" if config.name == "cross_entropy" else "loss/policy"] = total
    if loss.clipped is not None:
        metrics["policy/clip_frac"] = _mean(loss.clipped)
    if loss.ratio is None:
        return metrics
    drop = sampling_logprobs - training_logprobs
    return metrics | {
        "policy/ratio_mean": _mean(loss.ratio),
        "policy/ratio_max": float(loss.ratio.max()),
        "policy/ratio_min": float(loss.ratio.min()),
        "policy/kl_sampling_training/mean": _mean(drop),
        "policy/kl_sampling_training/max": float(drop.max()),
        "policy/kl_sampling_training_k3/mean": _mean(torch.expm1(-drop) + drop),
    }


def _mean(values: Tensor) -> float:
    return float(values.detach().double().mean())
