# pyright: reportUnknownMemberType=false
"""Policy losses: pure functions on flat vectors over trained tokens. Formulas and sources: `docs/losses.md`.

`n` is the number of trained tokens; every vector has shape [n], those of numbers are float32. `training_logprobs` carry
the gradient; `sampling_logprobs` come from the server that drew the tokens. Losses are per token and the trainer sums
them under weights that belong to the whole step (`cua_rl/rl/train_step.py`). So how tokens fall into sequences and
micro-batches changes nothing.

By default a loss has one ratio, training over sampling probability. With `decoupled_ppo`, `tis_cap` or `icepop_*` it
has two (`LossConfig.has_behaviour_weight`): training over proximal probability, clipped and differentiated, and
proximal over sampling probability, a constant weight that may be truncated or masked. The proximal policy is the
trainer's own at the start of the step.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cua_rl.config import LossConfig

KL_WEIGHT_CAP = 5.0
"""Most that a token weighs in the KL term: stale tokens must not outweigh all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """What losses know about the trained tokens."""

    training_logprobs: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    turn_ids: Tensor
    """int64, counted from 0: which tokens were sampled in one answer; a turn lies in one micro-batch as a whole."""
    proximal_logprobs: Tensor | None = None
    """Of the policy at the start of the step; None if that is the policy that is being differentiated."""
    reference_logprobs: Tensor | None = None
    """Of the policy that training started from; needed for the KL term only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss per token, and what to report of it."""

    losses: Tensor  # [n], differentiable
    clipped: Tensor | None = None  # [n] bool: the clip took hold of the token's ratio; None if nothing clips
    masked: Tensor | None = None  # [n] bool: sampler and trainer differ too much, the token is left out
    kl: Tensor | None = None  # [n], divergence from the reference (k3), before its coefficient
    kl_k1: Tensor | None = None  # [n], the k1 estimate of the same divergence

    def detach(self) -> "TokenLoss":
        """The same without the graph behind it."""
        return replace(self, losses=self.losses.detach())


def token_losses(config: LossConfig, tokens: LossTokens) -> TokenLoss:
    """The configured loss of every trained token."""
    if config.name == "cross_entropy":
        return cross_entropy(tokens.training_logprobs)
    old_logprobs, weight, masked = tokens.sampling_logprobs, None, None
    if config.has_behaviour_weight:
        old_logprobs = tokens.training_logprobs.detach()
        if tokens.proximal_logprobs is not None:
            old_logprobs = tokens.proximal_logprobs
        weight, masked = behaviour_weight(config, tokens, old_logprobs)
    loss = _policy_loss(config, tokens, old_logprobs)
    if weight is not None:
        loss = replace(loss, losses=weight * loss.losses, masked=masked)
    if config.kl_loss_coef:
        loss = _add_kl(config, loss, tokens)
    return loss


def _policy_loss(config: LossConfig, tokens: LossTokens, old_logprobs: Tensor) -> TokenLoss:
    training_logprobs, advantages = tokens.training_logprobs, tokens.advantages
    clip = config.clip_low, config.clip_high
    match config.name:
        case "importance_sampling":
            return importance_sampling(training_logprobs, old_logprobs, advantages)
        case "ppo" | "decoupled_ppo":
            return ppo(training_logprobs, old_logprobs, advantages, *clip, config.dual_clip)
        case "cispo":
            return cispo(training_logprobs, old_logprobs, advantages, *clip)
        case "gspo":
            return gspo(training_logprobs, old_logprobs, advantages, tokens.turn_ids, *clip)
        case "cross_entropy":
            return cross_entropy(training_logprobs)


def importance_sampling(training_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """- ratio * advantage; on policy (ratio 1) its gradient is the policy gradient - advantage * grad log p."""
    return TokenLoss(losses=-torch.exp(training_logprobs - old_logprobs) * advantages)


def ppo(
    training_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """- min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage), as in arXiv 1707.06347.

    With `dual_clip` (arXiv 1912.09729) the loss of a token of negative advantage is at most dual_clip * |advantage|,
    and has no gradient there.
    """
    ratio = torch.exp(training_logprobs - old_logprobs)
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def cispo(
    training_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """- clip(ratio, 1 - clip_low, 1 + clip_high) * advantage * log p, the clipped ratio a constant (arXiv 2506.13585).

    Every token keeps a gradient; only its weight is bounded.
    """
    ratio = torch.exp(training_logprobs.detach() - old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(losses=-weight * advantages * training_logprobs, clipped=weight != ratio)


def gspo(
    training_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    turn_ids: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped surrogate with one ratio per turn, the geometric mean of its tokens' (arXiv 2507.18071).

    The paper's sequence is one sampled answer, here a turn: so the split of a rollout into datums changes nothing. This
    is the token form (its section 4.3), in which every token hands its gradient to the turn's ratio: with one advantage
    per turn it equals the sequence form, summed over tokens instead of averaged (`normalisation` decides on that).
    """
    turn_ratio = torch.exp(turn_means(training_logprobs.detach() - old_logprobs, turn_ids))
    ratio = turn_ratio * torch.exp(training_logprobs - training_logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, None)


def cross_entropy(training_logprobs: Tensor) -> TokenLoss:
    """- log p of every token on the mask, weight 1; advantages and sampling log-probabilities are not looked at."""
    return TokenLoss(losses=-training_logprobs)


def behaviour_weight(config: LossConfig, tokens: LossTokens, proximal_logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
    """min(proximal / sampling probability, tis_cap), zero where IcePop masks; and the mask, None if there is none.

    Whole, it is decoupled PPO's behaviour weight (arXiv 2505.24298); truncated, truncated importance sampling of the
    gap between sampler and trainer; masked outside [icepop_low, icepop_high], IcePop. Under gspo it is the turn's too.
    """
    log_weight = (proximal_logprobs - tokens.sampling_logprobs).detach()
    if config.name == "gspo":
        log_weight = turn_means(log_weight, tokens.turn_ids)
    ratio = torch.exp(log_weight)
    weight = ratio if config.tis_cap is None else ratio.clamp(max=config.tis_cap)
    if config.icepop_low is None and config.icepop_high is None:
        return weight, None
    masked = torch.zeros_like(ratio, dtype=torch.bool)
    if config.icepop_low is not None:
        masked |= ratio < config.icepop_low
    if config.icepop_high is not None:
        masked |= ratio > config.icepop_high
    return weight.masked_fill(masked, 0.0), masked


def kl_to_reference(
    training_logprobs: Tensor, sampling_logprobs: Tensor, reference_logprobs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(policy || reference) as a loss per token, and two estimates of it: k3 and k1.

    With x = log policy - log reference, k3 is exp(-x) - 1 + x and k1 is x. The loss has k3's value, and the gradient of
    the divergence itself, ratio * x * grad log p. Differentiating the estimates would not give that: k1's gradient is
    zero in the mean, k3's is that of another divergence (arXiv 2506.09477). The ratio of training over sampling
    probability corrects for tokens of an older policy; it is truncated at KL_WEIGHT_CAP.
    """
    x = (training_logprobs - reference_logprobs).detach()
    weight = torch.exp(training_logprobs.detach() - sampling_logprobs).clamp(max=KL_WEIGHT_CAP)
    k1, k3 = weight * x, weight * (torch.expm1(-x) + x)
    return k3 + k1 * (training_logprobs - training_logprobs.detach()), k3, k1


def turn_means(values: Tensor, turn_ids: Tensor) -> Tensor:
    """[n]: for every token the mean of `values` over its turn."""
    if not len(values):
        return values
    sums = torch.zeros(int(turn_ids.max()) + 1, dtype=values.dtype, device=values.device)
    counts = torch.zeros_like(sums)
    sums.index_add_(0, turn_ids, values)
    counts.index_add_(0, turn_ids, torch.ones_like(values))
    return (sums / counts.clamp(min=1.0))[turn_ids]


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    free = ratio * advantages
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate, clipped = torch.minimum(free, held), (held < free).detach()
    if dual_clip is not None:
        floor = dual_clip * advantages
        too_low = (advantages < 0) & (surrogate.detach() < floor)
        surrogate, clipped = torch.where(too_low, floor, surrogate), clipped | too_low
    return TokenLoss(losses=-surrogate, clipped=clipped)


def _add_kl(config: LossConfig, loss: TokenLoss, tokens: LossTokens) -> TokenLoss:
    """Masked tokens are left out of the KL term too: their probabilities are not to be trusted."""
    if tokens.reference_logprobs is None:
        raise ValueError(
            "expected reference_logprobs with kl_loss_coef, got none; ask the trainer for reference_logprobs first"
        )
    parts = kl_to_reference(tokens.training_logprobs, tokens.sampling_logprobs, tokens.reference_logprobs)
    masked = loss.masked
    term, k3, k1 = parts if masked is None else (part.masked_fill(masked, 0.0) for part in parts)
    return replace(loss, losses=loss.losses + config.kl_loss_coef * term, kl=k3, kl_k1=k1)
