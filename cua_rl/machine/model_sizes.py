"""The dimensions of a model from its config.json, and the memory that they imply.

Activations are those of our trainer in bfloat16 under autocast, counted tensor by tensor from its layers and checked
against measured peaks (`benchmarks/trainer_peaks.py`, docs/dev/gpus.md).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cua_rl.types.errors import ConfigError

BYTES_16, BYTES_32 = 2, 4
_LOGITS = 3 * 128 * 2**20
"""The head holds logits, probabilities and their residuals of so many tokens that each takes 128 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSizes:
    """Dimensions of linear attention (a gated delta rule behind a short convolution)."""

    num_layers: int
    key: int
    """Width of queries, and of keys."""
    key_head_dim: int
    value: int
    """Width of values, gates and outputs."""
    num_value_heads: int
    value_head_dim: int
    convolution: int
    """Tokens that the convolution sees."""

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer's attention."""
        mixed = 2 * self.key + self.value
        maps = hidden * (mixed + 2 * self.value + 2 * self.num_value_heads)
        return maps + self.convolution * mixed + 2 * self.num_value_heads + self.value_head_dim

    def lora_sides(self, hidden: int) -> int:
        """Inputs and outputs of one layer's maps to queries, keys and values, to gates (three) and from outputs."""
        return 5 * hidden + (2 * self.key + self.value) + 2 * self.num_value_heads + 2 * self.value

    @property
    def state_bytes(self) -> int:
        """State of a sequence in the server, over all layers: a float32 matrix per head, and convolution tokens."""
        matrices = BYTES_32 * self.value * self.key_head_dim
        return self.num_layers * (matrices + BYTES_16 * (self.convolution - 1) * (2 * self.key + self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Dimensions of a vision-language model; parameters are counts, not bytes."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense layer, or of one expert."""
    num_experts: int
    """0 for a dense model."""
    experts_per_token: int
    shared_expert: int
    """Width of the expert that every token visits; 0 for none."""
    vocabulary: int
    is_head_tied: bool
    """The head is the embedding."""
    vision_parameters: int
    vision_layers: int
    vision_hidden: int
    vision_intermediate: int
    feature_levels: int
    """Vectors per image token: the merger's and those of every deepstack level."""
    pixel_bytes_per_token: int
    """Size of an image in the server: a byte per channel of every pixel, once per frame of a patch."""
    has_head_norms: bool = True
    """Whether queries and keys are normalised."""
    linear: LinearSizes | None = None
    """The layers with linear attention, of a model that has some."""

    @property
    def query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of keys, and of values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attentions(self) -> int:
        """Decoder layers with softmax attention."""
        return self.num_layers - (self.linear.num_layers if self.linear else 0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer with softmax attention."""
        attention = self._attention_parameters
        one = 3 * self.hidden * self.intermediate
        feed_forward = self.num_experts * (one + self.hidden) if self.num_experts else one
        if self.shared_expert:  # with a gate
            feed_forward += self.hidden * (3 * self.shared_expert + 1)
        return attention + feed_forward + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding, head and the last norm."""
        return (1 if self.is_head_tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def decoder_parameters(self) -> int:
        """Parameters of all decoder layers."""
        extra = self._mixer_difference(lambda linear: linear.parameters(self.hidden), self._attention_parameters)
        return self.num_layers * self.layer_parameters + extra

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + self.embedding_parameters + self.vision_parameters

    @property
    def _attention_parameters(self) -> int:
        gate = self.query if self.linear else 0  # beside the queries, in models that have linear attention, too
        return self.hidden * (2 * (self.query + self.key) + gate) + 2 * self.head_dim

    def _mixer_difference(self, of_linear: Callable[[LinearSizes], int], of_attention: int) -> int:
        """What linear attention in place of softmax attention adds to a sum over all layers."""
        return self.linear.num_layers * (of_linear(self.linear) - of_attention) if self.linear else 0

    @property
    def active_decoder_parameters(self) -> int:
        """Those of the decoder layers that a token passes through: of the experts, only the chosen ones."""
        idle = self.num_experts - self.experts_per_token if self.num_experts else 0
        return self.decoder_parameters - idle * self.num_layers * 3 * self.hidden * self.intermediate

    @property
    def active_parameters(self) -> int:
        """`parameters` without those of experts that are not chosen."""
        return self.active_decoder_parameters + self.embedding_parameters + self.vision_parameters

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters on the attention and, in a dense model, the feed-forward part of every layer."""
        # q, k, v, o: inputs and outputs
        attention = 4 * self.hidden + 2 * (self.query + self.key) + (self.query if self.linear else 0)
        extra = self._mixer_difference(lambda linear: linear.lora_sides(self.hidden), attention)
        sides = attention
        if not self.num_experts:
            sides += 3 * (self.hidden + self.intermediate)
        return rank * (self.num_layers * sides + extra)

    def kv_bytes_per_token(self, tensor_parallel: int) -> int:
        """KV cache per token on one GPU; heads that cannot be split further are repeated."""
        heads = max(1, self.num_kv_heads // tensor_parallel)
        return 2 * self.num_attentions * heads * self.head_dim * BYTES_16

    def feature_bytes(self, num_tokens: int) -> int:
        """Size of the visual features of that many image tokens."""
        return self.feature_levels * num_tokens * self.hidden * BYTES_16

    def layer_activations(self, rank: int) -> int:
        """Bytes per token that one decoder layer keeps for its backward pass."""
        # rotated queries and attended values; keys and values
        attention = 2 * BYTES_16 * (self.query + self.key)
        if self.has_head_norms:  # inputs of the norms in float32, their variances, and what the rotation keeps
            attention += (BYTES_32 + BYTES_16) * self.query + BYTES_32 * self.key
            attention += 2 * BYTES_32 * self.num_heads + BYTES_32 * self.num_kv_heads
        if self.linear:  # a gate and its sigmoid
            attention += 2 * BYTES_16 * self.query
        return attention + 4 * BYTES_16 * rank + self._shared_activations(rank)

    def linear_layer_activations(self, rank: int) -> int:
        """The same of a layer with linear attention; what its chunks keep follows from peaks of four widths."""
        assert self.linear is not None, "expected a model with linear attention"
        # Transformers' own computation, in float32
        attention = 93 * self.linear.value + 8 * self.linear.key
        return attention + 5 * BYTES_16 * rank + self._shared_activations(rank)

    def _shared_activations(self, rank: int) -> int:
        """What both kinds of layers keep: inputs of norms and maps, and the feed-forward part."""
        # inputs of norms in float32; queries, keys and values share one input in bfloat16, gate and up another
        inputs = 1 if self.num_experts else 2
        hidden = (2 * BYTES_32 + inputs * BYTES_16) * self.hidden
        if not self.num_experts:
            return hidden + 4 * BYTES_16 * self.intermediate + 3 * BYTES_16 * rank
        chosen = self.experts_per_token * (BYTES_16 * self.hidden + 3 * BYTES_16 * self.intermediate)
        routing = BYTES_32 * self.num_experts + 32 * self.experts_per_token
        shared = BYTES_16 * (self.hidden + 4 * self.shared_expert) if self.shared_expert else 0
        return hidden + chosen + routing + shared

    def layer_backward(self) -> int:
        """Bytes per token that the backward pass of one layer's feed-forward part needs for a moment."""
        if self.num_experts:
            return 2 * self.experts_per_token * (self.hidden + 4 * self.intermediate)
        return 2 * BYTES_16 * self.intermediate

    def attention_bytes(self, num_tokens: int) -> int:
        """What attention returns of one row: values, and how large the sums over all keys were, in float32."""
        return num_tokens * (self.num_attentions - 1) * (BYTES_16 * self.query + BYTES_32 * self.num_heads)

    def activation_bytes(self, num_tokens: int, rank: int, *, recomputes: bool) -> int:
        """Activations of one row of `num_tokens` at the peak of a step; embeddings, features and head included."""
        layer, backward = self.layer_activations(rank), self.layer_backward()
        linear = self.linear_layer_activations(rank) if self.linear else 0
        inner = self.num_layers - 1  # the last layer computes the few tokens that predict a trained one
        # what is alive beside them at the peak follows from measured ones
        if recomputes:  # the input of every layer, and one layer in full, when the head's logits are gone
            one = layer + backward + (16 if self.num_experts else 4) * self.hidden
            if self.linear:
                one = max(one, linear + 8 * (self.hidden + self.linear.value) + (backward if self.num_experts else 0))
            return num_tokens * inner * BYTES_16 * self.hidden + max(num_tokens * one, _LOGITS)
        beside = 19 * self.hidden if self.num_experts else 3 * self.intermediate + 7 * self.hidden
        num_linear = self.num_layers - self.num_attentions
        per_token = (inner - num_linear) * layer + num_linear * linear + backward + beside
        return num_tokens * per_token + _LOGITS


def load_model_sizes(model_path: Path) -> ModelSizes:
    """Read a model folder's config.json; raises `ConfigError` if it does not state its dimensions."""
    settings: dict[str, Any] = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    try:
        return _model_sizes(settings)
    except KeyError as error:
        raise ConfigError(
            f"model_name: expected a config.json that states {error.args[0]}, got {str(model_path / 'config.json')!r} "
            "without; use the published one of the model"
        ) from None


def _model_sizes(settings: Mapping[str, Any]) -> ModelSizes:
    text: Mapping[str, Any] = settings.get("text_config", settings)
    vision: Mapping[str, Any] = settings.get("vision_config", {})
    num_heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    num_experts = int(text.get("num_experts") or 0)
    levels = 1 + len(vision.get("deepstack_visual_indexes", ()))
    return ModelSizes(
        hidden=hidden,
        num_layers=int(text["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=int(text.get("head_dim") or hidden // num_heads),
        intermediate=int(text["moe_intermediate_size"] if num_experts else text["intermediate_size"]),
        num_experts=num_experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0),
        shared_expert=int(text.get("shared_expert_intermediate_size") or 0),
        vocabulary=int(text["vocab_size"]),
        is_head_tied=bool(settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vision_parameters=_vision_parameters(vision, levels) if vision else 0,
        vision_layers=int(vision.get("depth", 0)),
        vision_hidden=int(vision.get("hidden_size", 0)),
        vision_intermediate=int(vision.get("intermediate_size", 0)),
        feature_levels=levels,
        pixel_bytes_per_token=_patch_values(vision) * int(vision.get("spatial_merge_size", 2)) ** 2 if vision else 0,
        has_head_norms=settings.get("model_type") != "qwen2_5_vl",
        linear=_linear_sizes(text),
    )


def _linear_sizes(text: Mapping[str, Any]) -> LinearSizes | None:
    if "linear_num_value_heads" not in text:
        return None
    num_layers, interval = int(text["num_hidden_layers"]), int(text.get("full_attention_interval") or 4)
    kinds = text.get("layer_types")
    stated = [kind == "linear_attention" for kind in kinds or ()]
    is_linear = stated or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    heads, head_dim = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    return LinearSizes(
        num_layers=sum(is_linear),
        key=int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"]),
        key_head_dim=int(text["linear_key_head_dim"]),
        value=heads * head_dim,
        num_value_heads=heads,
        value_head_dim=head_dim,
        convolution=int(text.get("linear_conv_kernel_dim", 4)),
    )


def _patch_values(vision: Mapping[str, Any]) -> int:
    frames = int(vision.get("temporal_patch_size", 2))
    return int(vision.get("in_channels", 3)) * frames * int(vision["patch_size"]) ** 2


def _vision_parameters(vision: Mapping[str, Any], levels: int) -> int:
    hidden, intermediate = int(vision["hidden_size"]), int(vision["intermediate_size"])
    patch = _patch_values(vision)
    matrices = 3 if vision.get("hidden_act") == "silu" else 2  # Qwen2.5-VL's are gated
    attention = 4 * hidden * (hidden + 1)
    feed_forward = matrices * hidden * intermediate + hidden + (matrices - 1) * intermediate
    merged = hidden * int(vision.get("spatial_merge_size", 2)) ** 2
    merger = merged * (merged + 1) + (merged + 1) * int(vision.get("out_hidden_size", hidden))
    norms = 2 * hidden + (levels - 1) * 2 * merged  # the merger's is over patches, those of the levels over tokens
    positions = int(vision.get("num_position_embeddings", 0)) * hidden
    blocks = int(vision["depth"]) * (attention + feed_forward + 4 * hidden)
    return patch * hidden + hidden + positions + blocks + levels * merger + norms
