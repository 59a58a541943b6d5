# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Causal attention over several sequences packed into one row: nothing is padded, no sequence sees another."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

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
    is_grouped = key.shape[1] != query.shape[1]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=is_grouped)
        for q, k, v in zip(*(x.split(list(sequence_lengths), dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
