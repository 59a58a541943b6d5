"""The parts that model server and trainer hold in memory, in bytes, by name.

Arithmetic on the model's dimensions, what the run asks of it, and where its processes are.
"""

import math
from dataclasses import dataclass

from cua_rl.machine.gpus import GpuPlacement, plan_gpus
from cua_rl.machine.machine import Machine
from cua_rl.machine.model_sizes import BYTES_16, BYTES_32, ModelSizes
from cua_rl.machine.prefix_cache import LARGEST_NUM_ROLLOUTS, RolloutShape, simulate_prefix_cache
from cua_rl.sampling.config import DEFAULT_NUM_SEQS, ServerConfig, max_lora_rank
from cua_rl.training.config import VISION_CACHE_GIB, Sharding, TrainerConfig

GIB = 2**30
KEPT_ATTENTION = "kept attention"
_CONTEXT = 0.7 * GIB  # CUDA context and libraries of a process, outside vLLM's share and torch's limit; an estimate
_NCCL = 1.0 * GIB  # its buffers in each of several processes, allocated before vLLM measures; an estimate
SPARE = 0.04
"""Share of a GPU that is left free for errors of the estimates."""
_BLOCK_TOKENS, _CPU_BLOCK_TOKENS = 16, 128  # of vLLM's KV cache, by default
_GRAPHS = 1.0 * GIB  # CUDA graphs of the server; an estimate
_FRAGMENTED = 0.05  # of the trainer's activations: what the allocator cannot use again; an estimate
_FAST_GPU = 70 * GIB  # from here on, vLLM takes 8192 tokens at a time instead of 2048
_TRAINER_BASE, _SERVER_BASE = 2.0 * GIB, 4.0 * GIB  # main memory of the processes; estimates
_SMALLEST_IMAGE_CACHE = 1.0 * GIB
_LEAST_CACHED_PROMPTS = 2  # vLLM 0.32 answers every request with 500 whose images exceed its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that the choice depends on; it fills in what is None in the settings."""

    model: ModelSizes
    machine: Machine
    server: ServerConfig
    trainer: TrainerConfig
    has_server: bool = True
    """Whether the run starts its own server."""
    has_trainer: bool = True
    context_tokens: int
    """Most tokens of a prompt with its answer, and so of a training sequence."""
    largest_image_tokens: int
    """What the server reserves work space for."""
    num_rollouts: int = LARGEST_NUM_ROLLOUTS
    """Rollouts at a time; 0: as many as the server's prefix cache can keep enough of the prompts of."""
    shape: RolloutShape | None = None
    """Their prompts; None if nothing is known of them."""
    is_context_fixed: bool = False
    """Whether the data sets the context, not a setting."""
    num_trained: int = 0
    """Rollouts that a step trains on."""

    @property
    def is_float32(self) -> bool:
        """Whether the trainer computes in float32."""
        return self.trainer.dtype == "float32" or (self.trainer.dtype == "auto" and not self.machine.gpus)

    @property
    def serves_float32(self) -> bool:
        """Whether the server does, on a GPU."""
        return self.server.dtype == "float32"

    def gpus(self) -> GpuPlacement:
        """Who uses which GPU; raises `ConfigError` for settings that cannot be met."""
        return plan_gpus(
            self.machine.gpus,
            self.server,
            self.trainer,
            self.model.num_heads,
            has_server=self.has_server,
            has_trainer=self.has_trainer,
        )


def usable_bytes(gpu_gib: float) -> float:
    """A GPU's memory as CUDA, torch and vLLM count it; the driver keeps the rest of what nvidia-smi shows.

    Published messages of torch: 79.2 GiB of an H100's 79.6 and an A100's 80.0, 22.1 of an L4's 22.5.
    """
    return 0.995 * gpu_gib * GIB - 0.45 * GIB


def outside_bytes(num_processes: int) -> float:
    """Of a process on its GPU, what neither vLLM's share nor torch's limit contains; with NCCL if there are several."""
    return _CONTEXT + (_NCCL if num_processes > 1 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToTrain:
    """How a trainer process holds weights and activations."""

    recomputes: bool
    keeps_attention: bool
    """Whether the results of attention are kept where the rest is recomputed."""
    sharding: Sharding
    row: int
    """Tokens, at most, of a row."""


def trainer_parts(request: Request, way: WayToTrain, gpus: GpuPlacement) -> dict[str, float]:
    """Bytes of a trainer process on its GPU."""
    if not request.has_trainer:
        return {}
    model, rank = request.model, request.trainer.lora_rank
    scale = 2 if request.is_float32 else 1
    in_use = 2 * model.layer_parameters  # one layer computes while the next one arrives
    match way.sharding:
        case "replicated":
            held, whole, in_use = model.parameters, model.parameters, 0
        case "full" | "hybrid":
            split, whole = model.decoder_parameters + model.vision_parameters, model.embedding_parameters
            held = split // gpus.num_trainer_processes + whole
        case "offload":
            held = whole = model.embedding_parameters + model.vision_parameters
    shared_by = request.trainer.context_parallel
    row = max(way.row, request.context_tokens)  # a longer sequence gets its own row
    activations = scale * model.activation_bytes(row // shared_by, rank, recomputes=way.recomputes)
    attention = scale * model.attention_bytes(row // shared_by) if way.keeps_attention else 0
    if shared_by > 1:  # one layer's keys and values of all tokens: the parts, the whole, and its gradient twice
        activations += 4 * scale * row * model.kv_bytes_per_token(1) / model.num_layers
    if rank:
        held += in_use
    elif in_use:  # as they are computed with, their gradients, and these in float32 while they are summed
        activations += in_use * (2 * scale * BYTES_16 + BYTES_32)
    return {
        "weights": weight_bytes(request) * held,
        **optimizer_part(request, gpus, held, whole),
        "activations": (1 + _FRAGMENTED) * activations,
        **({KEPT_ATTENTION: (1 + _FRAGMENTED) * attention} if attention else {}),
        "CUDA": outside_bytes(gpus.num_trainer_processes),
    }


def weight_bytes(request: Request) -> int:
    """Bytes per weight of the trainer: trained weights are float32."""
    return BYTES_32 if request.is_float32 or not request.trainer.lora_rank else BYTES_16


def optimizer_part(request: Request, gpus: GpuPlacement, held: int, whole: int) -> dict[str, float]:
    """What training adds to the weights: gradients and two moments in float32, and gradients in one message.

    If all are trained, a process trains those that it has `held`, of which the `whole` ones are not sharded.
    """
    messages = 0 if gpus.num_trainer_processes == 1 else 1
    rank = request.trainer.lora_rank
    if not rank:
        parts = {"gradients and optimizer": BYTES_32 * (3.0 * held + messages * whole)}
        if not request.is_float32:
            parts["weights for autocast"] = BYTES_16 * whole
        return parts
    # the adapter itself, too, and copies of it for autocast
    return {"adapter and optimizer": (4.5 + messages) * BYTES_32 * request.model.lora_parameters(rank)}


def sequence_bytes(request: Request, num_tokens: float, tensor_parallel: int) -> float:
    """Bytes that a server process keeps of one request on its GPU."""
    model = request.model
    scale = 2 if request.serves_float32 else 1
    # the states of linear attention in use, and those from which the next turn continues
    states = 2 * model.linear.state_bytes / tensor_parallel if model.linear else 0.0
    return scale * num_tokens * model.kv_bytes_per_token(tensor_parallel) + states


def cached_prefix(
    request: Request, gpus: GpuPlacement, *, kv_cache: float, shape: RolloutShape, num_rollouts: int
) -> float:
    """What is left of the prompts of so many rollouts at a time, which the copies of the model share evenly."""
    block_tokens = _BLOCK_TOKENS if gpus.server_gpus else _CPU_BLOCK_TOKENS
    of_each = math.ceil(num_rollouts / len(gpus.server_copies))
    states = sequence_bytes(request, 0, gpus.tensor_parallel)
    block = sequence_bytes(request, block_tokens, gpus.tensor_parallel) - states
    num_blocks = max(1, int((kv_cache - of_each * states) / block))
    return simulate_prefix_cache(shape, num_blocks=num_blocks, block_tokens=block_tokens, num_rollouts=of_each)


def server_parts(request: Request, tensor_parallel: int) -> dict[str, float]:
    """Bytes of a server process on its GPU, without its KV cache."""
    model, server = request.model, request.server
    scale = 2 if request.serves_float32 else 1
    is_fast = (request.machine.gpu_gib or 0.0) * GIB >= _FAST_GPU
    tokens = 8192 if is_fast else 2048
    language = tokens * (4 * model.intermediate * max(1, model.experts_per_token) + 16 * model.hidden)
    # the server tries out the largest image that the model takes: four patches per token
    image = 4 * request.largest_image_tokens * BYTES_16 * (10 * model.vision_hidden + 2 * model.vision_intermediate)
    logits = 3 * BYTES_32 * (server.max_num_seqs or DEFAULT_NUM_SEQS) * model.vocabulary
    features = model.feature_bytes(max(tokens, request.largest_image_tokens))
    slot_rank = max_lora_rank(request.trainer.lora_rank)  # vLLM's slots are of a few sizes
    return {
        "weights": scale * BYTES_16 * model.parameters / tensor_parallel,
        "adapters": scale * server.max_adapters * BYTES_16 * model.lora_parameters(slot_rank) / tensor_parallel,
        "work space": scale * (max(language, image) + features) + logits,
        "CUDA graphs": _GRAPHS,
        "CUDA": outside_bytes(tensor_parallel),
    }


def host_parts(request: Request, gpus: GpuPlacement, sharding: Sharding) -> dict[str, float]:
    """Main memory of all processes on a machine with GPUs."""
    model = request.model
    parts: dict[str, float] = {}
    if request.has_trainer:
        number = gpus.num_trainer_processes
        # processes share the pages of the checkpoint's files, but each makes a copy of frozen weights in another
        # precision than theirs; weights that stay in main memory are held once more
        is_copied = request.is_float32 and request.trainer.lora_rank
        parts["loading"] = (number * BYTES_32 if is_copied else BYTES_16) * model.parameters
        if sharding == "offload":
            parts["weights"] = _pinned_bytes(request)
        parts["vision cache"] = vision_cache_bytes(request, gpus)
        parts["trainer"] = number * _TRAINER_BASE
    if gpus.server_gpus:
        parts["server"] = len(gpus.server_copies) * _SERVER_BASE
        parts["image cache"] = image_cache_bytes(request, gpus, beside=sum(parts.values()))
    if request.has_trainer:
        parts["vision cache"] = vision_cache_bytes(request, gpus, beside=sum(parts.values()))
    return parts


def vision_cache_bytes(request: Request, gpus: GpuPlacement, *, beside: float = math.inf) -> float:
    """Main memory for the features of the screenshots that a step trains on, so that several passes encode them once;
    at least 2 GiB for each process, and beyond that a quarter of what is left `beside` everything else, as devices may
    be on this machine, too.
    """
    trainer, there = request.trainer, request.machine.host_gib
    if trainer.vision_cache_gib is not None:
        return gpus.num_trainer_processes * trainer.vision_cache_gib * GIB
    least = gpus.num_trainer_processes * VISION_CACHE_GIB * GIB
    if there is None or trainer.adapts_vision or not trainer.lora_rank:  # what a trained tower computes is not kept
        return least
    step = request.num_trained * request.model.feature_bytes(request.context_tokens) * request.trainer.context_parallel
    return max(least, min(step, least + (there * GIB - beside) / 4))


def _pinned_bytes(request: Request) -> float:
    """Decoder weights in pinned memory, of which PyTorch takes a power of two for every matrix."""
    model, one = request.model, weight_bytes(request)
    widths = (*(model.query, model.key) * 2, *(model.intermediate,) * 3)
    exact = [one * model.hidden * width for width in widths]
    rounded = [1 << (size - 1).bit_length() for size in exact]
    return one * model.decoder_parameters * sum(rounded) / sum(exact)


def image_cache_bytes(request: Request, gpus: GpuPlacement, *, beside: float) -> float:
    """Main memory for the screenshots of all rollouts under way, as the servers keep them; at most half of what is left
    `beside` everything else.

    A server processes an image again with every turn if its cache is too small. The context bounds the image tokens of
    a prompt, whatever the size of its screenshots.
    """
    there = request.machine.host_gib
    prompt = request.context_tokens * request.model.pixel_bytes_per_token
    least = len(gpus.server_copies) * max(_SMALLEST_IMAGE_CACHE, _LEAST_CACHED_PROMPTS * prompt)
    room = math.inf if there is None else (there * GIB - beside) / 2
    return max(least, min(request.num_rollouts * prompt, room))
