# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Causal attention over several sequences packed into one row: nothing is padded, no sequence sees another."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "cua_rl_packed"
"""The name of `packed_attention` among Transformers' attention implementations; it needs no mask, so none is built."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_lengths: Sequence[int],
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend inside each sequence of a packed row.

    query [1, heads, seq, head_dim], key and value [1, kv_heads, seq, head_dim]; `sequence_lengths` add up to seq.
    Answers [1, seq, heads, head_dim], as Transformers wants it.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _fused(query, key, value, sequence_lengths, scaling), None
    is_grouped = key.shape[1] != query.shape[1]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=is_grouped)
        for q, k, v in zip(*(x.split(list(sequence_lengths), dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _fused(query: Tensor, key: Tensor, value: Tensor, sequence_lengths: Sequence[int], scaling: float) -> Tensor:
    """One kernel for all sequences of the row."""
    from torch.nn.attention.varlen import varlen_attn  # CUDA only

    ends = torch.tensor([0, *accumulate(sequence_lengths)], dtype=torch.int32, device=query.device)
    longest = max(sequence_lengths)
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
