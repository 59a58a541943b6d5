# pyright: reportUnknownMemberType=false
"""A request's per-datum values as flat vectors over the trained tokens of a micro-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cua_rl.errors import TrainingError
from cua_rl.training import wire
from cua_rl.training.losses import LossTokens
from cua_rl.types import Datum


def make_loss_tokens(
    request: wire.ForwardBackward, datum_indices: Sequence[int], training_logprobs: Tensor
) -> LossTokens:
    """What the loss needs of the trained tokens of these datums, in their order: [n] each, beside their gradient."""
    datums = [request.datums[index] for index in datum_indices]
    device = training_logprobs.device

    def rows(values: tuple[tuple[float, ...], ...] | None) -> Tensor | None:
        return None if values is None else _flat(datums, [values[index] for index in datum_indices]).to(device)

    return LossTokens(
        training_logprobs=training_logprobs,
        sampling_logprobs=_flat(datums, [datum.sampling_logprobs for datum in datums]).to(device),
        advantages=_flat(datums, [datum.advantages for datum in datums]).to(device),
        turn_ids=turn_ids(datums).to(device),
        proximal_logprobs=rows(request.proximal_logprobs),
        base_logprobs=rows(request.base_logprobs),
    )


def token_weights(request: wire.ForwardBackward, datum_indices: Sequence[int], like: Tensor) -> Tensor:
    """[n]: every trained token's weight in the sum, that of its datum; 1 if the request names none."""
    if request.token_weights is None:
        return torch.ones_like(like)
    counts = [request.datums[index].num_trained_tokens for index in datum_indices]
    weights = torch.tensor([request.token_weights[index] for index in datum_indices], dtype=torch.float32)
    return weights.repeat_interleave(torch.tensor(counts)).to(like.device)


def turn_ids(datums: Sequence[Datum]) -> Tensor:
    """[n] int64: every run of trained tokens in a datum is one turn; turns count from 0 over all datums."""
    starts = [
        is_trained and not (position and datum.loss_mask[position - 1])
        for datum in datums
        for position, is_trained in enumerate(datum.loss_mask)
    ]
    trained = [is_trained for datum in datums for is_trained in datum.loss_mask]
    return (torch.tensor(starts, dtype=torch.int64).cumsum(0) - 1)[torch.tensor(trained, dtype=torch.bool)]


def check_rows(request: wire.ForwardBackward) -> None:
    """Raises `TrainingError` if what came beside the datums does not align with them."""
    if request.token_weights is not None and len(request.token_weights) != len(request.datums):
        raise TrainingError(
            f"expected one token weight per datum, got {len(request.token_weights)} for {len(request.datums)} datums"
        )
    for name, rows in (("proximal", request.proximal_logprobs), ("base", request.base_logprobs)):
        if rows is None:
            continue
        lengths = [len(row) for row in rows]
        expected = [datum.model_input.length for datum in request.datums]
        if lengths != expected:
            raise TrainingError(
                f"expected {name} log-probabilities aligned with the datums' {expected} tokens, got rows of {lengths}"
            )
    if request.loss.kl_loss_coef and request.base_logprobs is None:
        raise TrainingError("expected base log-probabilities with kl_loss_coef, got none: ask for base_logprobs first")


def _flat(datums: Sequence[Datum], rows: Sequence[Sequence[float]]) -> Tensor:
    """The values on the mask, datum after datum."""
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return values[torch.tensor([flag for datum in datums for flag in datum.loss_mask], dtype=torch.bool)]
