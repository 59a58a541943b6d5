# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The last decoder layer for those tokens alone whose successors are trained: nobody reads what it makes of others.

Its keys and values still come from every token, so nothing about the result changes. Of a rollout's tokens, most of
which are screenshots, few are predicted: the layer costs a fraction, and in small models a layer is much.
"""

from collections.abc import Sequence
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3_vl.modeling_qwen3_vl import rotate_half

from cua_rl.errors import ConfigError


def keep_predictors_only(model: Any) -> None:
    """Have the last layer of Qwen3-VL's language model answer [1, n, hidden] instead of [1, seq, hidden].

    Calls of the language model then need `sequence_lengths`, which add up to seq, and `predictors`: per sequence, where
    in it the n tokens stand. Raises `ConfigError` if visual features are still added to what the last layer makes.
    """
    layers = model.language_model.layers
    num_layers, num_levels = len(layers), len(model.config.vision_config.deepstack_visual_indexes)
    if num_layers <= num_levels:
        raise ConfigError(
            f"expected a model with more decoder layers than levels of visual features, got {num_layers} layers and "
            f"{num_levels} levels; use another model"
        )
    layer = layers[-1]
    layer.forward = MethodType(_forward, layer)


def _forward(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    sequence_lengths: Sequence[int],
    predictors: Sequence[Tensor],
    **_: object,
) -> Tensor:
    starts = accumulate(sequence_lengths[:-1], initial=0)
    kept = torch.cat([start + places for start, places in zip(starts, predictors, strict=True)])
    normed = layer.input_layernorm(hidden_states)
    query, key, value = _project(layer.self_attn, normed, kept, position_embeddings)
    attended = _attend(query, key, value, sequence_lengths, predictors, layer.self_attn.scaling)
    states = hidden_states[:, kept] + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _project(
    attention: Any, normed: Tensor, kept: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [1, heads, n, head_dim], keys and values [1, kv_heads, seq, head_dim], rotated to their positions."""

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    cos, sin = (part[:, None] for part in position_embeddings)
    query = attention.q_norm(heads(attention.q_proj(normed[:, kept])))
    key = attention.k_norm(heads(attention.k_proj(normed)))
    return (
        query * cos[:, :, kept] + rotate_half(query) * sin[:, :, kept],
        key * cos + rotate_half(key) * sin,
        heads(attention.v_proj(normed)),
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequence_lengths: Sequence[int],
    predictors: Sequence[Tensor],
    scaling: float,
) -> Tensor:
    """Each predictor over the tokens of its sequence up to itself, [1, heads, n, head_dim]."""
    num_queries = query.shape[1] // key.shape[1]
    counts, lengths = [len(places) for places in predictors], list(sequence_lengths)
    outputs: list[Tensor] = []
    parts = zip(query.split(counts, 2), key.split(lengths, 2), value.split(lengths, 2), predictors, strict=True)
    for q, k, v, places in parts:
        is_seen = torch.arange(k.shape[2], device=k.device) <= places[:, None]
        k, v = (x.repeat_interleave(num_queries, dim=1) for x in (k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scaling))
    return torch.cat(outputs, dim=2)
