# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Cheaper layers for Qwen models with the same results: packed attention, the last layer, LoRA, the patch embedding,
experts that stay in their files, and compiled norms, rotations and SwiGLU.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen3_vl.modeling_qwen3_vl import rotate_half

from cua_rl.training.context import ALONE, Context
from cua_rl.training.prefixes import Prefix
from cua_rl.types.errors import ConfigError

PACKED_ATTENTION = "cua_rl_packed"
"""The name of `packed_attention` in Transformers, which builds no mask for it."""

_aten: Any = torch.ops.aten
ATTENTION_KERNELS: list[OpOverload] = [
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._efficient_attention_forward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What `scaled_dot_product_attention` runs on GPUs and CPUs; each returns what its own backward pass needs."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_lengths: Sequence[int],
    scaling: float,
    prefixes: Sequence[Prefix] = (),
    context: Context = ALONE,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed row and to its prefix: no padding, none across sequences.

    query [1, heads, seq, head_dim], key and value [1, kv_heads, seq, head_dim]; `sequence_lengths` add up to seq, or to
    the tokens of all ranks of `context`. Without `prefixes`, sequences are whole. Returns [1, seq, heads, head_dim],
    the layout of Transformers.
    """
    num_tokens, lengths = sum(sequence_lengths), list(sequence_lengths)
    begin, end = context.span(num_tokens)
    keys, values = (x.split(lengths, dim=2) for x in context.gather_keys(key, value, num_tokens))
    bounds = [min(max(bound, begin), end) for bound in accumulate(lengths, initial=0)]
    queries = query.split([stop - start for start, stop in pairwise(bounds)], dim=2)
    outputs: list[Tensor] = []
    for place, (start, q) in enumerate(zip(accumulate(lengths, initial=0), queries, strict=False)):
        if q.shape[2]:  # the last query sees all of these keys
            k, v = (_seen(x, place, prefixes, bounds[place + 1] - start) for x in (keys, values))
            outputs.append(_attend(q, k, v, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _seen(parts: Sequence[Tensor], place: int, prefixes: Sequence[Prefix], num_own: int) -> Tensor:
    """Keys or values, by sequence, of a sequence's prefix and of its first tokens."""
    own = parts[place][:, :, :num_own]
    prefix = prefixes[place] if prefixes else ()
    return torch.cat([*(parts[other][:, :, :count] for other, count in prefix), own], dim=2) if prefix else own


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of heads that may share keys and values; the last query sees all of them."""
    num_queries, num_keys, is_seen = query.shape[2], key.shape[2], None
    is_grouped, is_causal = key.shape[1] != query.shape[1], num_queries == num_keys
    if not is_causal:
        with _disable_current_modes():  # that of selective recomputation would replace this kind of tensor
            is_seen = causal_lower_right(num_queries, num_keys)
    if is_grouped and query.is_cuda:
        settings = SDPAParams(query, key, value, None, 0.0, is_causal, True)
        if not can_use_flash_attention(settings):  # in float32, for example
            # of the other kernels none lets heads share keys: PyTorch would hold a number for every pair of tokens
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
            is_grouped = False
    return scaled_dot_product_attention(
        query, key, value, is_seen, is_causal=is_causal, scale=scaling, enable_gqa=is_grouped
    )


def attention_kernel(num_heads: int, num_kv_heads: int, head_dim: int, *, device: torch.device, dtype: Any) -> str:
    """What PyTorch computes such heads with, by its name for it, such as ScaledDotProductCudnnAttention."""
    query, key = (
        torch.zeros(1, number, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
        for number in (num_heads, num_kv_heads)
    )
    node = _attend(query, key, key, 1.0).grad_fn
    assert node is not None, "expected attention with a gradient, got none"
    return node.name().removesuffix("Backward0")


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def compile_elementwise(language_model: nn.Module) -> None:
    """Let PyTorch compile norms, the rotation of queries and keys, and SwiGLU: each then reads and writes memory once.

    Parameters keep their names. Matrix products and attention stay as they are.
    """
    for module in language_model.modules():
        children = dict(module.named_children())
        if "RMSNorm" in type(module).__name__:
            module.forward = MethodType(_compiled(type(module).forward), module)
        elif {"gate_proj", "up_proj", "down_proj"} <= children.keys():
            module.forward = MethodType(_swiglu_mlp, module)
        elif "q_proj" in children:
            source: Any = sys.modules[type(module).__module__]
            rotate = source.apply_rotary_pos_emb
            source.apply_rotary_pos_emb = _compiled(getattr(rotate, "_torchdynamo_orig_callable", rotate))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # for rows of any length; of norms there is a version for rows and one for heads, with gradients and without
    return torch.compile(function, dynamic=True)


def _swiglu_mlp(module: Any, hidden: Tensor) -> Tensor:
    return module.down_proj(_compiled(_gated)(module.act_fn, module.gate_proj(hidden), module.up_proj(hidden)))


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def keep_predictors_only(model: Any) -> None:
    """Make the last decoder layer return only the tokens that predict a trained token: [1, n, hidden].

    Few tokens of a rollout are predicted, as most of them are screenshots, so the layer costs a fraction. Its keys and
    values still come from every token: results do not change.

    Calls of the language model then need `sequence_lengths`, which add up to seq, and `predictors`: the positions of
    the n tokens in each sequence, behind its prefix if there are `prefixes`. With a `context` of several ranks, n
    counts this rank's tokens. Raises `ConfigError` if visual features are added after the last layer.
    """
    layers = model.language_model.layers
    num_layers = len(layers)
    num_levels = len(model.config.vision_config.to_dict().get("deepstack_visual_indexes", ()))
    if num_layers <= num_levels:
        raise ConfigError(
            f"expected a model with more decoder layers than levels of visual features, got {num_layers} layers and "
            f"{num_levels} levels; use another model"
        )
    layer = layers[-1]
    if "self_attn" not in dict(layer.named_children()):
        raise ConfigError(
            f"expected a model whose last decoder layer has softmax attention, got {type(layer).__name__} without; use "
            "another model"
        )
    layer.forward = MethodType(last_layer_forward, layer)


def last_layer_forward(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    sequence_lengths: Sequence[int],
    predictors: Sequence[Tensor],
    prefixes: Sequence[Prefix] = (),
    context: Context = ALONE,
    **_: object,
) -> Tensor:
    """The forward pass of `keep_predictors_only`, [1, seq, hidden] -> [1, n, hidden]."""
    attention = layer.self_attn
    starts = accumulate(sequence_lengths[:-1], initial=0)
    num_tokens = sum(sequence_lengths)
    kept = torch.cat([start + places for start, places in zip(starts, predictors, strict=True)])
    kept = kept - context.span(num_tokens)[0]
    normed = layer.input_layernorm(hidden_states)

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    # rotated to their positions: queries [1, heads, n, head_dim], keys and values [1, kv_heads, seq, head_dim]
    cos, sin = (part[:, None] for part in position_embeddings)
    norms, no_norm = dict(attention.named_children()), nn.Identity()  # Qwen2.5-VL has none
    projected = attention.q_proj(normed[:, kept]).unflatten(-1, (attention.config.num_attention_heads, -1))
    query, *gate = projected.split(attention.head_dim, -1)  # Qwen3.5's has a gate beside every head
    query = norms.get("q_norm", no_norm)(query.transpose(1, 2))
    query = _rotate(query, cos[:, :, kept], sin[:, :, kept])
    key = _rotate(norms.get("k_norm", no_norm)(heads(attention.k_proj(normed))), cos, sin)
    value = heads(attention.v_proj(normed))
    key, value = context.gather_keys(key, value, num_tokens)

    # each predictor attends to the prefix and the tokens of its sequence up to itself
    outputs: list[Tensor] = []
    counts, lengths = [len(places) for places in predictors], list(sequence_lengths)
    parts = [x.split(lengths, 2) for x in (key, value)]
    for place, (q, places) in enumerate(zip(query.split(counts, 2), predictors, strict=True)):
        k, v = (_seen(x, place, prefixes, lengths[place]) for x in parts)
        is_seen = torch.arange(k.shape[2], device=k.device) <= places[:, None] + (k.shape[2] - lengths[place])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=attention.scaling))
    attended = torch.cat(outputs, dim=2).transpose(1, 2)
    for one in gate:
        attended = attended * one.sigmoid()
    attended = attended.flatten(2)
    states = hidden_states[:, kept] + attention.o_proj(attended)
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads turned to their positions; Qwen3.5 turns the first part of each only."""
    turned, kept = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def separate_sequences(language_model: Any) -> None:
    """Make every linear attention of the model reset its state at each sequence of a packed row.

    Without flash-linear-attention, Transformers' own ignores sequence boundaries: its recurrent state and its
    convolution would run on from one sequence into the next.
    """
    for layer in language_model.layers:
        attention = dict(layer.named_children()).get("linear_attn")
        if attention is not None:
            attention.forward = MethodType(linear_attention_forward, attention)


def linear_attention_forward(
    attention: Any, hidden_states: Tensor, *, sequence_lengths: Sequence[int], **_: object
) -> Tensor:
    """The forward pass of `separate_sequences`, [1, seq, hidden] -> [1, seq, hidden]."""
    parts = hidden_states.split(list(sequence_lengths), dim=1)
    return torch.cat([type(attention).forward(attention, part) for part in parts], dim=1)


@torch.no_grad()
def require_separate_sequences(language_model: Any) -> None:
    """Raises `ConfigError` if tokens of a packed row see the sequence before theirs: its loader has other attention."""
    device = language_model.embed_tokens.weight.device
    positions = torch.arange(8, device=device).remainder(4).expand(3, 1, 8)

    def last_states(first: int, lengths: Sequence[int]) -> Tensor:
        output = language_model(
            input_ids=torch.arange(first, 8, device=device)[None],
            position_ids=positions[:, :, first:],
            sequence_lengths=lengths,
            use_cache=False,
        )
        return output.last_hidden_state[:, -4:].float()

    alone = last_states(4, [4])
    packed, joined = (torch.linalg.vector_norm(last_states(0, lengths) - alone) for lengths in ([4, 4], [8]))
    if not packed < 0.1 * joined:  # rounding is far smaller; a leak is the whole value
        raise ConfigError(
            "trainer.loader: expected attention that keeps the sequences of a packed row apart, got one that does not; "
            "set trainer.loader=hf"
        )


class FusedLoraLinear(PeftLinear):
    """peft's LoRA layer with the update inside the matrix products: about half of the passes over the activations.

    `Adapters` has peft use it for `nn.Linear`. In half precision, it keeps the input as it is for the backward
    pass, where peft keeps a copy for every projection. With the adapter disabled, peft's own code runs.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> x W^T + scaling * x A^T B^T [..., out]."""
        base, device = self.get_base_layer(), x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        (key,) = self.active_adapters
        if self.disable_adapters or self.merged or base.weight.dtype != dtype or key not in self.lora_A:
            return super().forward(x, *args, **kwargs)
        # the adapter stays in float32, as the optimizer needs it
        a, b = self.lora_A[key].weight.to(dtype), self.lora_B[key].weight.to(dtype)
        weight = base.weight.to(x.device, non_blocking=True)  # a copy of what `StreamedLinear` keeps in main memory
        with torch.autocast(device, enabled=False):
            return _LoraLinear.apply(x.to(dtype), weight, base.bias, a, b, self.scaling[key])  # type: ignore[no-any-return]


class _LoraLinear(torch.autograd.Function):
    """Rows x [n, in], frozen weight [out, in] and bias [out], a [rank, in], b [out, rank]."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] - torch's own takes anything
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ a.T
        output = torch.nn.functional.linear(rows, weight, bias).addmm_(inner, b.T, alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scaling = scaling  # type: ignore[attr-defined]
        # sizes are named because a rank in an idle pass has no rows, for which -1 is ambiguous
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, inner, weight, a, b = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        inner_gradient = (gradient @ b).mul_(ctx.scaling)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = (gradient @ weight).addmm_(inner_gradient, a).view(*gradients[0].shape[:-1], weight.shape[1])
        return to_x, None, None, inner_gradient.T @ rows, (gradient.T @ inner).mul_(ctx.scaling), None


class StreamedLinear(nn.Module):
    """A frozen linear layer whose weights stay in main memory and are copied to the device for the moment of use.

    Autograd keeps the copy until the backward pass of this use. With recomputed activations that is the backward pass
    of one decoder layer, so the device never holds more than one layer's weights and what is being copied.
    """

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.weight = frozen.weight
        self.bias: nn.Parameter | None = frozen.bias
        if torch.cuda.is_available():  # copies from pinned memory do not wait for the device
            self.weight.data = self.weight.data.pin_memory()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        weight = self.weight.to(x.device, non_blocking=True)
        return linear(x, weight, None if self.bias is None else self.bias.to(x.device))

    def _apply(self, fn: Any, recurse: bool = True) -> "StreamedLinear":
        """Stay in main memory when the model moves."""
        return self


def stream_frozen_weights(base: Any) -> None:
    """Keep the frozen matrices of the decoder layers in main memory; parameters keep their names."""
    for layer in base.model.language_model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not child.weight.requires_grad:
                    setattr(parent, name, StreamedLinear(child))


class LinearPatchEmbed(nn.Module):
    """The tower's patch embedding as one matrix product: its convolution is slow, and its windows do not overlap."""

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """patches [num_patches, channels * patch_size**2], the same for every frame -> [num_patches, hidden]."""
        weight = self.proj.weight  # [hidden, channels, frames, patch_size, patch_size]
        one_frame = patches.to(weight.dtype).view(len(patches), weight.shape[1], 1, -1)
        frames = one_frame.expand(-1, -1, weight.shape[2], -1)
        return linear(frames.flatten(1), weight.flatten(1), self.proj.bias)


def use_linear_patch_embedding(tower: Any) -> None:
    """Replace the tower's patch embedding; parameters keep their names."""
    tower.add_module("patch_embed", LinearPatchEmbed(tower.patch_embed.proj))


class ViewedTranspose(Transpose):
    """Transformers' operation without its copy, which every process would make in main memory."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One weight as the model has it; a file that Transformers wrote may have it so already."""
        ((_, found),) = input_dict.items()
        tensor: Tensor = found[0] if isinstance(found, list) else found
        expected = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape
        return {target_patterns[0]: tensor if tensor.shape == expected else tensor.transpose(self.dim0, self.dim1)}


def leave_experts_in_files() -> None:
    """Let processes that load Qwen3-VL's experts, which its files hold transposed, share the pages of these files."""
    names = [f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    converters = [WeightConverter(name, name, [ViewedTranspose(1, 2, check_dims=True)]) for name in names]
    register_checkpoint_conversion_mapping("qwen3_vl_moe", [*converters], overwrite=True)
