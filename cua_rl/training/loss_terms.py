# pyright: reportUnknownMemberType=false
"""Losses for data of other policies, the weight of off-policy tokens, and the KL divergence from the reference.

Shapes and names as in `losses.py`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cua_rl.training.config import LossConfig

KL_WEIGHT_CAP = 5.0
"""Maximum weight of a token in the KL term, so that stale tokens do not outweigh all others."""

DPPO_RATIO_CAP = 20.0
_LEAST_TAIL = 1e-6
"""Probability of all other tokens, at least; where there is none, there is no gradient either."""


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


def dppo(
    training_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, max_fall: float, max_rise: float
) -> TokenLoss:
    """-ratio * advantage * log p with a constant ratio, unless the probability has moved too far (arXiv 2602.04879).

    A token is excluded if its probability, which its advantage raises or lowers, has already risen by more than
    `max_rise` or fallen by more than `max_fall`: the total variation between the two policies, as far as this token
    shows it. Rare tokens with large ratios keep their gradient; their ratio counts as DPPO_RATIO_CAP at most.
    """
    moved = training_logprobs.detach().exp() - old_logprobs.exp()
    excluded = ((advantages > 0) & (moved > max_rise)) | ((advantages < 0) & (-moved > max_fall))
    ratio = torch.exp(training_logprobs.detach() - old_logprobs).clamp(max=DPPO_RATIO_CAP)
    return TokenLoss(losses=-ratio.masked_fill(excluded, 0.0) * advantages * training_logprobs, clipped=excluded)


def stable_reinforce(training_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """REINFORCE with score centering, -advantage * (1 - c) * log p (arXiv 2609.20807); there is no importance ratio.

    If sampler q and trainer p differ, the mean of grad log p over q is not zero, and even advantages without meaning
    move the policy. This mean is subtracted. Of q only the probability of the sampled token is known, so all others
    share what is left as they do under p: c = q - p (1 - q) / (1 - p), hence 1 - c = (1 - q) / (1 - p).
    """
    missing, expected = torch.expm1(sampling_logprobs), torch.expm1(training_logprobs.detach())  # minus 1 - q, 1 - p
    weight = missing / expected.clamp(max=-_LEAST_TAIL)
    return TokenLoss(losses=-weight * advantages * training_logprobs)


def behaviour_weight(
    config: LossConfig,
    proximal_logprobs: Tensor,
    sampling_logprobs: Tensor,
    turn_ids: Tensor,
    in_ratio: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """min(proximal / sampling probability, tis_cap), zero where IcePop masks; and that mask, None without IcePop.

    Neither truncated nor masked, it is decoupled PPO's behaviour weight (arXiv 2505.24298). `tis_cap` makes it
    truncated importance sampling, which corrects for sampler and trainer computing different probabilities; IcePop
    masks tokens outside [icepop_low, icepop_high]. With gspo the weight is per turn, too.
    """
    log_weight = (proximal_logprobs - sampling_logprobs).detach()
    if config.name == "gspo":
        log_weight = turn_means(log_weight, turn_ids, in_ratio)
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
    training_logprobs: Tensor, sampling_logprobs: Tensor, reference_logprobs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(policy || reference) as a loss per token, and two estimates of it: k3 and k1.

    With x = log policy - log reference, k3 is exp(-x) - 1 + x and k1 is x. The loss has k3's value, and the gradient of
    the divergence itself, ratio * x * grad log p. Differentiating the estimates would not give that: k1's gradient is
    zero in the mean, k3's is that of another divergence (arXiv 2506.09477). The ratio of training over sampling
    probability corrects for tokens of an older policy; it is truncated at KL_WEIGHT_CAP.
    """
    if reference_logprobs is None:
        raise ValueError(
            "expected reference_logprobs with kl_loss_coef, got none; ask the trainer for reference_logprobs first"
        )
    x = (training_logprobs - reference_logprobs).detach()
    weight = torch.exp(training_logprobs.detach() - sampling_logprobs).clamp(max=KL_WEIGHT_CAP)
    k1, k3 = weight * x, weight * (torch.expm1(-x) + x)
    return k3 + k1 * (training_logprobs - training_logprobs.detach()), k3, k1


def turn_means(values: Tensor, turn_ids: Tensor, counted: Tensor | None = None) -> Tensor:
    """[n]: the mean of `values` over each token's turn, or over those of its tokens that are `counted`."""
    if not len(values):
        return values
    sums = torch.zeros(int(turn_ids.max()) + 1, dtype=values.dtype, device=values.device)
    counts = torch.zeros_like(sums)
    ones = torch.ones_like(values) if counted is None else counted.to(values)
    sums.index_add_(0, turn_ids, values if counted is None else values * ones)
    counts.index_add_(0, turn_ids, ones)
    return (sums / counts.clamp(min=1.0))[turn_ids]
