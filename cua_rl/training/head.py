# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Log-probabilities of given tokens, in float32, without ever holding [n, vocabulary] logits for the whole batch."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cua_rl.training.grammars import AllowedTokens

_MAX_LOGITS = 2**25
"""Logits held at a time, at most: 128 MiB in float32."""


class TokenScores(NamedTuple):
    """Per token, float32 [n] each."""

    logprobs: Tensor
    entropies: Tensor
    """Entropy of the token's whole distribution in nats; no gradient."""


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: AllowedTokens | None = None
) -> TokenScores:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that softmax.

    hidden [n, hidden], weight [vocabulary, hidden], targets [n]; the softmax is over the tokens that are `allowed`,
    None for all. Memory does not grow with n * vocabulary, neither forward nor backward.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return TokenScores(*_FrozenHead.apply(hidden, weight, targets, temperature, allowed))  # type: ignore[misc]

    # a trained head takes plain autograd; the backward pass recomputes the logits
    def score(part: Tensor, part_targets: Tensor, part_allowed: AllowedTokens | None) -> tuple[Tensor, Tensor]:
        logits = _logits(part, _matrix(weight)) / temperature
        if part_allowed is not None:
            logits = part_allowed.forbid_others(logits)
        normaliser = logits.logsumexp(dim=1, keepdim=True)
        with torch.no_grad():
            entropies = _entropies((logits - normaliser).exp_(), logits, normaliser)
        return (logits.gather(1, part_targets[:, None]) - normaliser)[:, 0], entropies

    scores = [checkpoint(score, *part, use_reentrant=False) for part in _parts(hidden, targets, allowed, weight)]
    return TokenScores(
        torch.cat([logprobs for logprobs, _ in scores]), torch.cat([entropies for _, entropies in scores])
    )


class _FrozenHead(torch.autograd.Function):
    """The gradient of `hidden` is known up to one factor per token, so the forward pass keeps it instead of logits.

    d log p(target) / d hidden = (onehot(target) - probabilities) @ weight / temperature.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] - torch's own takes anything
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: AllowedTokens | None
    ) -> tuple[Tensor, Tensor]:
        needs_gradient: bool = ctx.needs_input_grad[0]
        logprobs, entropies, directions = [], [], []
        matrix = _matrix(weight)
        for part, part_targets, part_allowed in _parts(hidden, targets, allowed, weight):
            logits = _logits(part, matrix)
            if temperature != 1.0:
                logits.div_(temperature)
            if part_allowed is not None:
                part_allowed.forbid_others(logits)
            # log p = logit - normaliser where a row is largest: p there is at least 1 / vocabulary, so its log is
            # exact, and no other pass over the exponentials is needed
            largest, where = logits.max(dim=1, keepdim=True)
            probabilities = logits.softmax(dim=1)
            normaliser = largest - probabilities.gather(1, where).log()
            logprobs.append((logits.gather(1, part_targets[:, None]) - normaliser)[:, 0])
            entropies.append(_entropies(probabilities, logits, normaliser))
            if needs_gradient:
                directions.append(
                    gradient_directions(probabilities, matrix, part_targets).to(hidden.dtype) / temperature
                )
        if needs_gradient:
            ctx.save_for_backward(torch.cat(directions))
        together = torch.cat(entropies)
        ctx.mark_non_differentiable(together)
        return torch.cat(logprobs), together

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (directions,) = ctx.saved_tensors
        return directions * gradients[0][:, None].to(directions.dtype), None, None, None, None


def gradient_directions(probabilities: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """(onehot(targets) - probabilities) @ matrix, [n, hidden]; overwrites `probabilities` [n, vocabulary], float32.

    The difference is taken before rounding to the matrix's precision. As a row minus a product, what is left of a token
    of probability 0.999 would be smaller than the rounding errors of the two.
    """
    residuals = probabilities.neg_()
    residuals[torch.arange(len(targets), device=targets.device), targets] += 1.0
    return residuals.to(matrix.dtype) @ matrix


def _entropies(probabilities: Tensor, logits: Tensor, normaliser: Tensor) -> Tensor:
    """-sum p log p = normaliser - sum p * logit per row, without another matrix of that size."""
    expected_logits = torch.bmm(probabilities[:, None, :], logits[:, :, None])
    return normaliser[:, 0] - expected_logits[:, 0, 0]


def _parts(
    hidden: Tensor, targets: Tensor, allowed: AllowedTokens | None, weight: Tensor
) -> Iterator[tuple[Tensor, Tensor, AllowedTokens | None]]:
    """As many tokens at a time as `_MAX_LOGITS` has room for."""
    size = max(1, _MAX_LOGITS // weight.shape[0])
    masks = repeat(None) if allowed is None else allowed.split(size)
    return zip(hidden.split(size), targets.split(size), masks, strict=False)


def _matrix(weight: Tensor) -> Tensor:
    """Half precision stays on CUDA, whose kernels accumulate and return float32; on CPU the weight becomes float32."""
    return weight if weight.is_cuda else weight.float()


def _logits(hidden: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dtype == torch.float32:
        return hidden.float() @ matrix.T
    return torch.mm(hidden.to(matrix.dtype), matrix.T, out_dtype=torch.float32)
