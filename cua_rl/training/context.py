# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Rows that several ranks share (context parallelism), for sequences too long for one: each computes a stretch of them.

Everything but attention computes token by token. In attention, a rank needs the keys and values of all tokens, which
are few where several heads share them (grouped-query attention): they are gathered, and freed after the layer if
activations are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import FunctionCtx

from cua_rl.types.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This rank among those that share its rows; a rank alone has whole rows."""

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    def bounds(self, num_tokens: int) -> list[int]:
        """Rank r has the tokens of a row from bounds[r] to bounds[r + 1]; raises `TrainingError` if it has none."""
        if num_tokens < self.size:
            raise TrainingError(
                f"trainer.context_parallel: expected a token for each of the {self.size} ranks that share a row, got "
                f"{num_tokens}; lower it"
            )
        return [num_tokens * rank // self.size for rank in range(self.size + 1)]

    def span(self, num_tokens: int) -> tuple[int, int]:
        """Where this rank's tokens of a row begin and end."""
        bounds = self.bounds(num_tokens)
        return bounds[self.rank], bounds[self.rank + 1]

    def gather_keys(self, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, own, head_dim] of all tokens; the gradient counts every rank's use of them."""
        if self.size == 1:
            return key, value
        lengths = [end - start for start, end in pairwise(self.bounds(num_tokens))]
        # in one message: two could be sent in another order backward on another rank
        both: Tensor = _Gather.apply(torch.cat((key, value), dim=1), self, lengths, 2, True)  # type: ignore[assignment]
        return both[:, : key.shape[1]], both[:, key.shape[1] :]

    def gather_scores(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Values of the trained tokens [own] of all ranks, from which every rank computes the same loss."""
        if self.size == 1 or not any(counts):
            return own
        return _Gather.apply(own, self, counts, 0, False)  # type: ignore[no-any-return]


ALONE = Context()


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks. Backward, a rank's part gets the sum of all ranks' gradients, or its own."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] - torch's own takes anything
        ctx: FunctionCtx, own: Tensor, context: Context, lengths: Sequence[int], dim: int, sums: bool
    ) -> Tensor:
        ctx.place = (context, lengths, dim, sums)  # type: ignore[attr-defined]
        shape = list(own.shape)
        shape[dim] = max(lengths)
        padded = own.new_zeros(shape)  # parts of one size are all that gloo gathers
        padded.narrow(dim, 0, own.shape[dim]).copy_(own)
        parts = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(parts, padded, group=context.group)
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        context, lengths, dim, sums = ctx.place
        gradient = gradients[0].contiguous()
        if sums:
            gradient = gradient.clone()
            distributed.all_reduce(gradient, group=context.group)
        start = sum(lengths[: context.rank])
        return gradient.narrow(dim, start, lengths[context.rank]), None, None, None, None
