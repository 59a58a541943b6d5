"""How fast a GPU samples and trains a model, from the operations and bytes needed and the GPU's peak rates."""

from collections.abc import Mapping
from dataclasses import dataclass

from cua_rl.host.gpu_peaks import BFLOAT16_TFLOP_PER_S as _PEAKS
from cua_rl.machine.model_sizes import BYTES_16, ModelSizes
from cua_rl.planning.fleet import Speed
from cua_rl.planning.plan_config import Assumptions

_PATCHES_PER_TOKEN = 4  # every family merges 2 x 2 patches into a token
_PASS_S = 0.004  # of the server's process, per pass of the decoder: scheduling, adapters, log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """A GPU's limits as its maker states them."""

    memory_gib: float
    """Memory that its driver reports."""
    tflop_per_s: float
    """Dense bfloat16, 10^12 operations per second."""
    gb_per_s: float
    """Memory bandwidth, 10^9 bytes per second."""
    usd_per_hour: float
    """An assumption, of the order of cloud prices; set your own price."""


GPU_KINDS: Mapping[str, GpuKind] = {
    "l4": GpuKind(memory_gib=22.5, tflop_per_s=_PEAKS["L4"], gb_per_s=300, usd_per_hour=0.8),
    "a10g": GpuKind(memory_gib=22.5, tflop_per_s=_PEAKS["A10G"], gb_per_s=600, usd_per_hour=1.0),
    "rtx4090": GpuKind(memory_gib=23.6, tflop_per_s=_PEAKS["RTX 4090"], gb_per_s=1008, usd_per_hour=0.5),
    "l40s": GpuKind(memory_gib=44.5, tflop_per_s=_PEAKS["L40S"], gb_per_s=864, usd_per_hour=1.2),
    "a100": GpuKind(memory_gib=79.2, tflop_per_s=_PEAKS["A100"], gb_per_s=2039, usd_per_hour=1.8),
    "h100": GpuKind(memory_gib=79.6, tflop_per_s=_PEAKS["H100"], gb_per_s=3350, usd_per_hour=3.0),
    "h200": GpuKind(memory_gib=139.8, tflop_per_s=_PEAKS["H200"], gb_per_s=4800, usd_per_hour=3.8),
    "b200": GpuKind(memory_gib=178.0, tflop_per_s=_PEAKS["B200"], gb_per_s=8000, usd_per_hour=5.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """Tokens of a turn, and of what it sees."""

    screen: float
    text: float
    sampled: float
    context: float
    """Context of a request, averaged over the turns of a rollout."""

    @property
    def total(self) -> float:
        """Tokens that the turn adds."""
        return self.screen + self.text + self.sampled


def server_speed(model: ModelSizes, gpu: GpuKind, tensor_parallel: int, turn: TurnTokens, assume: Assumptions) -> Speed:
    """Speed of one copy of the model on `tensor_parallel` GPUs.

    A pass of the decoder reads all weights, whatever the batch, and the KV cache of every request in it. The prompt is
    in the prefix cache but for what the turn adds.
    """
    bytes_per_s = tensor_parallel * gpu.gb_per_s * 1e9 * assume.bandwidth_frac
    flop_per_s = tensor_parallel * gpu.tflop_per_s * 1e12 * assume.server_mfu
    weights = BYTES_16 * model.parameters
    cache = model.kv_bytes_per_token(1) * turn.context
    prefilled = (turn.screen + turn.text) * 2 * model.active_parameters + image_flop(model, turn.screen)
    return Speed(
        alone_s=turn.sampled * (weights / bytes_per_s + _PASS_S),
        each_s=turn.sampled * (cache / bytes_per_s + 2 * model.active_parameters / flop_per_s) + prefilled / flop_per_s,
    )


def trained_token_s(
    model: ModelSizes,
    gpu: GpuKind,
    turn: TurnTokens,
    assume: Assumptions,
    *,
    num_turns: float,
    lora_rank: int,
    recomputes: bool,
    keeps_attention: bool = False,
) -> float:
    """Seconds of one GPU per token of rollouts whose turns all merged; every screenshot passes the vision tower once.

    `recomputes`: activations are recomputed in the backward pass, with `keeps_attention` all but attention's results.
    """
    num_tokens = assume.prompt_tokens + num_turns * turn.total
    flop = token_flop(model, num_tokens, lora_rank, recomputes=recomputes, keeps_attention=keeps_attention)
    flop += num_turns * image_flop(model, turn.screen) / num_tokens
    return flop / (gpu.tflop_per_s * 1e12 * assume.trainer_mfu)


def token_flop(
    model: ModelSizes, num_tokens: float, lora_rank: int, *, recomputes: bool, keeps_attention: bool = False
) -> float:
    """Operations per token of sequences of so many: forward, backward without gradients of frozen weights, and the
    forward pass once more where activations are recomputed, without attention if that is kept.
    """
    again = 1 if recomputes else 0
    decoder = model.active_decoder_parameters
    seen = model.num_attentions * 4 * model.query * num_tokens / 2  # scores and values; a token sees half of the others
    adapter = 2 * model.lora_parameters(lora_rank)
    return (2 + again) * 2 * decoder + (3 + again) * (seen + adapter) - (again * seen if keeps_attention else 0)


def image_flop(model: ModelSizes, image_tokens: float) -> float:
    """Operations of the vision tower for one screenshot: products with its weights, and attention of its patches.

    Mergers take what the patches of an image token have in common.
    """
    patches, merged = _PATCHES_PER_TOKEN * image_tokens, _PATCHES_PER_TOKEN * model.vision_hidden
    mergers = model.feature_levels * merged * (merged + model.hidden)
    products = (model.vision_parameters - mergers) * patches + mergers * image_tokens
    return 2 * products + 4 * model.vision_layers * model.vision_hidden * patches**2
