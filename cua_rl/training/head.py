# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Log-probabilities of given tokens, in float32, without ever holding [n, vocabulary] logits for the whole batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_MAX_LOGITS = 2**25
"""Most logits at a time: 128 MiB in float32."""


class TokenScores(NamedTuple):
    """What the head says of n tokens: float32, [n] each."""

    logprobs: Tensor
    entropies: Tensor
    """Of the whole distribution that the token was drawn from, nats; no gradient."""


def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that softmax.

    hidden [n, hidden], weight [vocabulary, hidden], targets [n]. Memory does not grow with n * vocabulary, neither
    forward nor backward.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        return _trained_head(hidden, weight, targets, temperature)
    return TokenScores(*_FrozenHead.apply(hidden, weight, targets, temperature))  # type: ignore[misc]


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """The log-probabilities alone."""
    return token_scores(hidden, weight, targets, temperature).logprobs


class _FrozenHead(torch.autograd.Function):
    """The gradient to `hidden` is known but for one factor per token, so the forward pass keeps it instead of logits.

    d log p(target) / d hidden = (onehot(target) - probabilities) @ weight / temperature.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] - torch's own takes anything
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        needs_gradient: bool = ctx.needs_input_grad[0]
        logprobs, entropies, directions = [], [], []
        matrix = _matrix(weight)
        for part, part_targets in zip(_chunks(hidden, weight), _chunks(targets, weight), strict=True):
            logits = _logits(part, matrix)
            if temperature != 1.0:
                logits.div_(temperature)
            probabilities, normaliser = _softmax(logits)
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (directions,) = ctx.saved_tensors
        return directions * gradients[0][:, None].to(directions.dtype), None, None, None


def gradient_directions(probabilities: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """(onehot(targets) - probabilities) @ matrix, [n, hidden]; overwrites `probabilities` [n, vocabulary], float32.

    The difference is taken before anything is rounded to the matrix's precision. The other way round, as a row minus a
    product, what is left of a token of probability 0.999 is smaller than the rounding of the two.
    """
    residuals = probabilities.neg_()
    residuals[torch.arange(len(targets), device=targets.device), targets] += 1.0
    return residuals.to(matrix.dtype) @ matrix


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and the log of what they were normalised by [n, 1], without another pass over the exponentials.

    Where a row is largest, log p = logit - normaliser; p there is at least 1 / vocabulary, so its log is exact.
    """
    largest, where = logits.max(dim=1, keepdim=True)
    probabilities = logits.softmax(dim=1)
    return probabilities, largest - probabilities.gather(1, where).log()


def _trained_head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    """The plain way, for a head that is trained too; logits are computed again in the backward pass."""

    def score(part: Tensor, part_targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(part, _matrix(weight)) / temperature
        normaliser = logits.logsumexp(dim=1, keepdim=True)
        with torch.no_grad():
            entropies = _entropies((logits - normaliser).exp_(), logits, normaliser)
        return (logits.gather(1, part_targets[:, None]) - normaliser)[:, 0], entropies

    parts = zip(_chunks(hidden, weight), _chunks(targets, weight), strict=True)
    scores = [checkpoint(score, part, part_targets, use_reentrant=False) for part, part_targets in parts]
    return TokenScores(
        torch.cat([logprobs for logprobs, _ in scores]), torch.cat([entropies for _, entropies in scores])
    )


def _entropies(probabilities: Tensor, logits: Tensor, normaliser: Tensor) -> Tensor:
    """- sum p log p = normaliser - sum p * logit, row by row, without another matrix of that size."""
    expected_logits = torch.bmm(probabilities[:, None, :], logits[:, :, None])
    return normaliser[:, 0] - expected_logits[:, 0, 0]


def _chunks(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, _MAX_LOGITS // weight.shape[0]))


def _matrix(weight: Tensor) -> Tensor:
    """Half precision stays what it is on CUDA, whose kernels accumulate and answer in float32; CPUs get float32."""
    return weight if weight.is_cuda else weight.float()


def _logits(hidden: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dtype == torch.float32:
        return hidden.float() @ matrix.T
    return torch.mm(hidden.to(matrix.dtype), matrix.T, out_dtype=torch.float32)
