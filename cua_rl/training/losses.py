# pyright: reportUnknownMemberType=false
"""Policy losses: pure functions on flat vectors over trained tokens. Formulas and sources: `docs/losses.md`.

`n` is the number of trained tokens; every vector has shape [n] and dtype float32 unless stated otherwise. Only
`training_logprobs` carry a gradient; `sampling_logprobs` come from the server that sampled the tokens. Losses are per
token, and the trainer sums them with weights that are defined over the whole step (`cua_rl/rl/train_step.py`).
Therefore the split of tokens into sequences and micro-batches does not change the result.

By default a loss has one ratio, training over sampling probability. With `decoupled_ppo`, `tis_cap` or `icepop_*` it
has two (`LossConfig.has_behaviour_weight`): training over proximal probability, which is clipped and differentiated,
and proximal over sampling probability, a constant weight that may be truncated or masked. The proximal policy is the
trainer's own at the start of the step.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cua_rl.config import LossConfig

KL_WEIGHT_CAP = 5.0
"""Maximum weight of a token in the KL term, so that stale tokens do not outweigh all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Inputs of the losses: the trained tokens of a micro-batch."""

    training_logprobs: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    turn_ids: Tensor
    """int64, counted from 0: the turn that sampled the token; a micro-batch holds all tokens of a turn."""
    proximal_logprobs: Tensor | None = None
    """Of the policy at the start of the step; None: the current policy is that policy."""
    reference_logprobs: Tensor | None = None
    """Of the policy that training started from; only the KL term needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss per token, and what metrics report of it."""

    losses: Tensor  # [n], differentiable
    clipped: Tensor | None = None  # [n] bool: clipping changed the token's loss; None: the loss does not clip
    masked: Tensor | None = None  # [n] bool: excluded, because sampler and trainer differ too much
    kl: Tensor | None = None  # [n], divergence from the reference (k3), before its coefficient
    kl_k1: Tensor | None = None  # [n], the k1 estimate of the same divergence

    def detach(self) -> "TokenLoss":
        """The same values without the autograd graph."""
        return replace(self, losses=self.losses.detach())


def token_losses(config: LossConfig, tokens: LossTokens) -> TokenLoss:
    """The configured loss of every trained token."""
    training_logprobs, advantages = tokens.training_logprobs, tokens.advantages
    if config.name == "cross_entropy":
        # -log p with weight 1: demonstrations have no advantages, and nothing sampled them
        return TokenLoss(losses=-training_logprobs)
    old_logprobs, weight, masked = tokens.sampling_logprobs, None, None
    if config.has_behaviour_weight:
        old_logprobs = training_logprobs.detach() if tokens.proximal_logprobs is None else tokens.proximal_logprobs
        weight, masked = behaviour_weight(config, tokens, old_logprobs)
    clip = config.clip_low, config.clip_high
    match config.name:
        case "importance_sampling":
            loss = importance_sampling(training_logprobs, old_logprobs, advantages)
        case "ppo" | "decoupled_ppo":
            loss = ppo(training_logprobs, old_logprobs, advantages, *clip, config.dual_clip)
        case "cispo":
            loss = cispo(training_logprobs, old_logprobs, advantages, *clip)
        case "gspo":
            loss = gspo(training_logprobs, old_logprobs, advantages, tokens.turn_ids, *clip)
    if weight is not None:
        loss = replace(loss, losses=weight * loss.losses, masked=masked)
    if config.kl_loss_coef:
        if tokens.reference_logprobs is None:
            raise ValueError(
                "expected reference_logprobs with kl_loss_coef, got none; ask the trainer for reference_logprobs first"
            )
        parts = kl_to_reference(training_logprobs, tokens.sampling_logprobs, tokens.reference_logprobs)
        # masked tokens are excluded from the KL term, too: their probabilities cannot be trusted
        term, k3, k1 = parts if masked is None else (part.masked_fill(masked, 0.0) for part in parts)
        loss = replace(loss, losses=loss.losses + config.kl_loss_coef * term, kl=k3, kl_k1=k1)
    return loss


def importance_sampling(training_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """-ratio * advantage; on policy (ratio 1) its gradient is the policy gradient, -advantage * grad log p."""
    return TokenLoss(losses=-torch.exp(training_logprobs - old_logprobs) * advantages)


def ppo(
    training_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage), arXiv 1707.06347.

    With `dual_clip` (arXiv 1912.09729) the loss of a token with negative advantage is at most dual_clip * |advantage|,
    where it has no gradient.
    """
    ratio = torch.exp(training_logprobs - old_logprobs)
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def cispo(
    training_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) * advantage * log p, the clipped ratio a constant (arXiv 2506.13585).

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
    """The clipped surrogate with one ratio per turn, the geometric mean of its tokens' ratios (arXiv 2507.18071).

    The paper's sequence is one sampled answer, here a turn; therefore the split of a rollout into datums has no effect.
    This is the token form (section 4.3), in which every token contributes its gradient to the turn's ratio. With one
    advantage per turn it equals the sequence form, summed over tokens instead of averaged (see `normalisation`).
    """
    turn_ratio = torch.exp(turn_means(training_logprobs.detach() - old_logprobs, turn_ids))
    ratio = turn_ratio * torch.exp(training_logprobs - training_logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, None)


def behaviour_weight(config: LossConfig, tokens: LossTokens, proximal_logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
    """min(proximal / sampling probability, tis_cap), zero where IcePop masks; and that mask, None without IcePop.

    Neither truncated nor masked, it is decoupled PPO's behaviour weight (arXiv 2505.24298). `tis_cap` makes it
    truncated importance sampling, which corrects for sampler and trainer computing different probabilities; IcePop
    masks tokens outside [icepop_low, icepop_high]. With gspo the weight is per turn, too.
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
    """[n]: the mean of `values` over each token's turn."""
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
