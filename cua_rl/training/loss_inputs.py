# pyright: reportUnknownMemberType=false
"""A request's per-datum values as flat vectors over the trained tokens of a micro-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cua_rl.errors import TrainingError
from cua_rl.training import wire
from cua_rl.training.losses import LossTokens


def make_loss_tokens(
    request: wire.ForwardBackward, datum_indices: Sequence[int], training_logprobs: Tensor
) -> LossTokens:
    """What the loss needs of the trained tokens of these datums, in their order: [n] each, beside their gradient."""
    datums = [request.datums[index] for index in datum_indices]
    device = training_logprobs.device
    mask = torch.cat([torch.tensor(datum.loss_mask) for datum in datums])

    def rows(values: tuple[tuple[float, ...], ...] | None) -> Tensor | None:
        return None if values is None else _flat([values[index] for index in datum_indices], mask).to(device)

    return LossTokens(
        training_logprobs=training_logprobs,
        sampling_logprobs=_flat([datum.sampling_logprobs for datum in datums], mask).to(device),
        advantages=_flat([datum.advantages for datum in datums], mask).to(device),
        turn_ids=turn_ids(mask).to(device),
        proximal_logprobs=rows(request.proximal_logprobs),
        reference_logprobs=rows(request.reference_logprobs),
    )


def token_weights(request: wire.ForwardBackward, datum_indices: Sequence[int], like: Tensor) -> Tensor:
    """[n]: every trained token's weight in the sum, that of its datum; 1 if the request names none."""
    if request.token_weights is None:
        return torch.ones_like(like)
    counts = [request.datums[index].num_trained_tokens for index in datum_indices]
    weights = torch.tensor([request.token_weights[index] for index in datum_indices], dtype=torch.float32)
    return weights.repeat_interleave(torch.tensor(counts)).to(like.device)


def turn_ids(mask: Tensor) -> Tensor:
    """[n] int64 from the datums' masks end to end: every run of trained tokens is one turn, counted from 0.

    No run crosses datums: the first token of a datum is never trained.
    """
    starts = mask.clone()
    starts[1:] &= ~mask[:-1]
    return (starts.cumsum(0) - 1)[mask]


def check_rows(request: wire.ForwardBackward) -> None:
    """Raises `TrainingError` if what came beside the datums does not align with them."""
    if request.token_weights is not None and len(request.token_weights) != len(request.datums):
        raise TrainingError(
            f"expected one token weight per datum, got {len(request.token_weights)} for {len(request.datums)} datums"
        )
    for name, rows in (("proximal", request.proximal_logprobs), ("reference", request.reference_logprobs)):
        if rows is None:
            continue
        lengths = [len(row) for row in rows]
        expected = [datum.model_input.length for datum in request.datums]
        if lengths != expected:
            raise TrainingError(
                f"expected {name} log-probabilities aligned with the datums' {expected} tokens, got rows of {lengths}"
            )
    if request.loss.kl_loss_coef and request.reference_logprobs is None:
        raise TrainingError(
            "expected reference log-probabilities with kl_loss_coef, got none: ask for reference_logprobs first"
        )


def _flat(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """The values on the mask, datum after datum."""
    return torch.cat([torch.tensor(row, dtype=torch.float32) for row in rows])[mask]
