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

from cua_rl.training.config import LossConfig
from cua_rl.training.loss_terms import TokenLoss, behaviour_weight, dppo, kl_to_reference, stable_reinforce, turn_means


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Inputs of the losses: the trained tokens of a micro-batch."""

    training_logprobs: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    turn_ids: Tensor
    """int64, counted from 0: the turn that sampled the token; a micro-batch holds all tokens of a turn."""
    in_ratio: Tensor | None = None
    """bool: the tokens over which gspo takes the mean of a turn; None: all."""
    proximal_logprobs: Tensor | None = None
    """Of the policy at the start of the step; None: the current policy is that policy."""
    reference_logprobs: Tensor | None = None
    """Of the policy that training started from; only the KL term needs them."""


def token_losses(config: LossConfig, tokens: LossTokens) -> TokenLoss:
    """The configured loss of every trained token."""
    training_logprobs = tokens.training_logprobs
    old_logprobs, weight, masked = tokens.sampling_logprobs, None, None
    if config.has_behaviour_weight:
        old_logprobs = training_logprobs.detach() if tokens.proximal_logprobs is None else tokens.proximal_logprobs
        ratios = (old_logprobs, tokens.sampling_logprobs)
        weight, masked = behaviour_weight(config, *ratios, tokens.turn_ids, tokens.in_ratio)
    loss = _policy_loss(config, tokens, old_logprobs)
    if weight is not None:
        loss = replace(loss, losses=weight * loss.losses, masked=masked)
    if config.kl_loss_coef:
        parts = kl_to_reference(training_logprobs, tokens.sampling_logprobs, tokens.reference_logprobs)
        # masked tokens are excluded from the KL term, too: their probabilities cannot be trusted
        term, k3, k1 = parts if masked is None else (part.masked_fill(masked, 0.0) for part in parts)
        loss = replace(loss, losses=loss.losses + config.kl_loss_coef * term, kl=k3, kl_k1=k1)
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
            return gspo(training_logprobs, old_logprobs, advantages, tokens.turn_ids, *clip, tokens.in_ratio)
        case "dppo":
            return dppo(training_logprobs, old_logprobs, advantages, *clip)
        case "dro":
            penalty = 0.5 * config.dro_beta * (training_logprobs - old_logprobs).square()
            return TokenLoss(losses=penalty - advantages * training_logprobs)
        case "stable_reinforce":
            return stable_reinforce(training_logprobs, tokens.sampling_logprobs, advantages)
        case "cross_entropy":
            return TokenLoss(losses=-training_logprobs * advantages)  # which are weights; nothing sampled these tokens


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
    in_ratio: Tensor | None = None,
) -> TokenLoss:
    """The clipped surrogate with one ratio per turn, the geometric mean of its tokens' ratios (arXiv 2507.18071).

    The paper's sequence is one sampled answer, here a turn; therefore the split of a rollout into datums has no effect.
    This is the token form (section 4.3), in which every token contributes its gradient to the turn's ratio. With one
    advantage per turn it equals the sequence form, summed over tokens instead of averaged (see `normalisation`).
    """
    turn_ratio = torch.exp(turn_means(training_logprobs.detach() - old_logprobs, turn_ids, in_ratio))
    ratio = turn_ratio * torch.exp(training_logprobs - training_logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, None)


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
