"""Plans the memory of model server and trainer before anything is loaded, and refuses what cannot fit.

A plan is arithmetic on the model's dimensions and the machine's size: no torch, no GPU. It chooses what was not set by
hand, the fastest way that fits first: recomputed activations, sharding, rows of tokens, tensor parallelism, the
server's share of a GPU, and its batch size. A refusal names settings with which the plan fits, each of them tried.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cua_rl.config import Sharding
from cua_rl.errors import ConfigError
from cua_rl.run.checkpoints import max_lora_rank
from cua_rl.run.gpus import ALONE_UTILIZATION, GpuPlan, GpuWishes, plan_gpus
from cua_rl.run.machine import Machine
from cua_rl.run.model_sizes import BYTES_16, BYTES_32, ModelSizes

GIB = 2**30
LONGEST_ROW = 16384
LARGEST_BATCH = 128
_CONTEXT = 0.7 * GIB  # CUDA context and libraries of a process; an estimate
_GRAPHS = 1.0 * GIB  # CUDA graphs of the server; an estimate
_FRAGMENTED = 0.05  # of the trainer's activations: what the allocator cannot use again; an estimate
_FAST_GPU = 70 * GIB  # from here on, vLLM takes 8192 tokens at a time instead of 2048
_NUM_CONTEXTS = (8, 4, 2, 1)  # full contexts in the KV cache, as many as there is room for: twice as many rollouts
_TRAINER_BASE, _SERVER_BASE = 2.0 * GIB, 4.0 * GIB  # main memory of the processes; estimates
_SMALLEST_IMAGE_CACHE = 1.0 * GIB
_LEAST_CACHED_PROMPTS = 2  # vLLM 0.32 answers 500, for ever, to a prompt whose images exceed its cache
_KV_ON_CPU = 1.0 * GIB
_GPU_SIZES = (24, 32, 40, 48, 80, 96, 141, 192)
_SMALLEST_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the run asks of the model."""

    context_tokens: int
    """Most tokens of a prompt with its answer, and so of a training sequence."""
    lora_rank: int
    """0 if all weights are trained."""
    largest_image_tokens: int
    """What the server reserves work space for."""
    num_rollouts: int = 128
    """At a time."""
    num_adapters: int = 4
    """Loaded into the server at a time."""
    is_float32: bool = False
    """Whether the trainer computes in float32."""
    serves_float32: bool = False
    """Whether the server does, on a GPU."""
    is_context_fixed: bool = False
    """Whether the data sets the context, not a setting."""
    trains_vision: bool = False
    """Whether the adapter reaches merger or vision tower."""
    vision_cache_gib: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWishes:
    """Settings given by hand; None leaves the choice to the plan."""

    gradient_checkpointing: bool | None = None
    micro_batch_tokens: int | None = None
    sharding: Sharding | None = None
    max_num_seqs: int | None = None
    context_parallel: int = 1
    """Trainer processes that share each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Chosen settings, and the bytes that follow from them, per process of each kind."""

    machine: Machine
    gpus: GpuPlan
    gradient_checkpointing: bool
    micro_batch_tokens: int
    sharding: Sharding
    max_num_seqs: int
    trainer: Mapping[str, float]
    server: Mapping[str, float]
    host: Mapping[str, float]  # main memory of all processes together

    @property
    def image_cache_gib(self) -> float:
        """Of each copy of the model server, for processed screenshots."""
        return self.host.get("image cache", 0.0) / len(self.gpus.server_copies) / GIB

    def table(self) -> str:
        """The plan for people."""
        gpus, host_gib = self.machine.gpus, _shown(self.machine.host_gib)
        where = "GPU" if gpus else "process"
        kind = f"{len(gpus)} GPUs of {_shown(self.machine.gpu_gib)}" if gpus else "no GPU"
        lines = [f"memory plan, GiB: {kind}, main memory {host_gib}"]
        columns = {f"trainer, per {where}": self.trainer, f"server, per {where}": self.server, "main memory": self.host}
        for title, parts in columns.items():
            if parts:
                shown = ", ".join(f"{name} {_shown(size / GIB)}" for name, size in parts.items())
                lines.append(f"  {title}: {_shown(sum(parts.values()) / GIB)} = {shown}")
        chosen = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return "\n".join([*lines, f"  {chosen}"])

    def effective(self) -> dict[str, object]:
        """The plan as config.json and the dry run show it."""
        parts = {"trainer": self.trainer, "server": self.server, "main_memory": self.host}
        gib = {title: {name: round(size / GIB, 2) for name, size in part.items()} for title, part in parts.items()}
        return {"memory_plan": {"settings": self._settings(), "gib": gib}, **self.gpus.effective()}

    def _settings(self) -> dict[str, object]:
        trainer: dict[str, object] = {
            "gradient_checkpointing": self.gradient_checkpointing,
            "micro_batch_tokens": self.micro_batch_tokens,
            "sharding": self.sharding,
        }
        server: dict[str, object] = {"max_num_seqs": self.max_num_seqs}
        if self.machine.gpus:
            server |= {
                "tensor_parallel": self.gpus.tensor_parallel,
                "gpu_memory_utilization": self.gpus.gpu_memory_utilization,
            }
        groups = {"trainer": trainer if self.trainer else {}, "server": server if self.server else {}}
        return {f"{group}.{name}": value for group, chosen in groups.items() for name, value in chosen.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything a plan depends on."""

    model: ModelSizes
    machine: Machine
    demand: Demand
    gpu_wishes: GpuWishes
    wishes: MemoryWishes


def plan_memory(request: Request) -> MemoryPlan:
    """The fastest plan that fits; raises `ConfigError`, with settings that would help, if none does."""
    plan = _find_plan(request)
    if plan is None:
        raise ConfigError(_refusal(request))
    if request.gpu_wishes.has_trainer:
        _require_sharding(request.wishes.sharding, plan.gpus.num_trainer_processes)
    _require_whole_heads(request.model.num_kv_heads, plan.gpus.tensor_parallel)
    weights = plan.host.get("weights", 0.0) + plan.host.get("loading", 0.0)
    there = request.machine.host_gib
    if there is not None and weights > there * GIB:
        raise ConfigError(
            f"memory: expected {_shown(weights / GIB)} GiB of main memory for the weights that its processes load, and "
            f"{_shown(sum(plan.host.values()) / GIB)} in all, got {_shown(there)}; choose a smaller model, "
            "or fewer trainer.num_processes"
        )
    return plan


def _require_sharding(wanted: Sharding | None, num_processes: int) -> None:
    """Raise `ConfigError` for a way to share the weights that does not go with the number of processes."""
    if wanted == "full" and num_processes == 1:
        raise ConfigError(
            "trainer.sharding: expected 'none' with one trainer process, which holds the whole model, got 'full'; set "
            "trainer.num_processes, or name several trainer.gpus"
        )
    if wanted == "offload" and num_processes > 1:
        raise ConfigError(
            f"trainer.sharding: expected 'full' with {num_processes} trainer processes, got 'offload', which is for "
            "one; set trainer.sharding=full, or trainer.num_processes=1"
        )


def _require_whole_heads(num_kv_heads: int, tensor_parallel: int) -> None:
    """Raise `ConfigError` for a number of GPUs over which vLLM cannot distribute keys and values."""
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise ConfigError(
            f"server.tensor_parallel: expected a divisor or a multiple of the model's {num_kv_heads} heads of keys and "
            f"values, got {tensor_parallel}; change it, or leave it out"
        )


def _find_plan(request: Request) -> MemoryPlan | None:
    if not request.machine.gpus:
        return _plan_on_cpu(request)
    if request.machine.gpu_gib is None:
        return _plan_unmeasured(request)
    for num_contexts in _NUM_CONTEXTS:
        for tensor_parallel in _tensor_parallel_sizes(request):
            wishes = replace(request.gpu_wishes, server_tensor_parallel=tensor_parallel)
            gpus = plan_gpus(request.machine.gpus, wishes, request.model.num_heads)
            plan = _fill_gpus(request, gpus, num_contexts)
            if plan is not None:
                return plan
    return None


def _tensor_parallel_sizes(request: Request) -> Iterator[int | None]:
    """From one GPU per copy of the server's model upwards: copies are faster than parts."""
    wanted = request.gpu_wishes.server_tensor_parallel
    gpus = plan_gpus(request.machine.gpus, request.gpu_wishes, request.model.num_heads)
    if wanted is not None or not gpus.server_gpus:
        yield wanted
        return
    size = 1
    while len(gpus.server_gpus) % size == 0 and request.model.num_heads % size == 0:
        yield size
        size *= 2


def _fill_gpus(request: Request, gpus: GpuPlan, num_contexts: int) -> MemoryPlan | None:
    """The first way to train that leaves the server room for `num_contexts` full contexts."""
    gpu = (request.machine.gpu_gib or 0.0) * GIB
    fixed = _server_parts(request, gpus.tensor_parallel) if gpus.server_gpus else {}
    context = request.demand.context_tokens
    contexts = num_contexts * _sequence_bytes(request, context, gpus.tensor_parallel)
    least = sum(fixed.values()) + contexts if fixed else 0.0
    for recomputes, sharding, row in _ways_to_train(request, gpus):
        trainer = _trainer_parts(request, recomputes=recomputes, sharding=sharding, row=row, gpus=gpus)
        trainer_total = sum(trainer.values())
        utilization = request.gpu_wishes.gpu_memory_utilization
        if utilization is None:
            left = gpu - trainer_total if gpus.is_shared else gpu
            utilization = max(0.0, min(ALONE_UTILIZATION, math.floor(100 * left / gpu) / 100))
        room = gpu - (utilization * gpu if gpus.is_shared else 0.0)
        if trainer_total > room or least > utilization * gpu:
            continue
        server, max_num_seqs = dict(fixed), request.wishes.max_num_seqs or LARGEST_BATCH
        if fixed:
            server["KV cache"] = utilization * gpu - sum(fixed.values())
            halves = int(server["KV cache"] / _sequence_bytes(request, context / 2, gpus.tensor_parallel))
            max_num_seqs = request.wishes.max_num_seqs or max(1, min(LARGEST_BATCH, halves))
        return MemoryPlan(
            machine=request.machine,
            gpus=replace(gpus, gpu_memory_utilization=utilization),
            gradient_checkpointing=recomputes,
            micro_batch_tokens=row,
            sharding=sharding,
            max_num_seqs=max_num_seqs,
            trainer=trainer,
            server=server,
            host=_host_parts(request, gpus, sharding),
        )
    return None


def _ways_to_train(request: Request, gpus: GpuPlan) -> Iterator[tuple[bool, Sharding, int]]:
    """(recomputes, sharding, tokens of a row), the fastest first."""
    demand, wishes = request.demand, request.wishes
    shardings: list[Sharding] = ["none", "full"] if gpus.num_trainer_processes > 1 else ["none", "offload"]
    if wishes.sharding is not None:
        shardings = [wishes.sharding]
    elif demand.trains_vision or not demand.lora_rank:
        shardings = ["none"]  # the others are for frozen weights
    elif request.model.num_experts:
        shardings = [one for one in shardings if one != "offload"]  # experts are no linear layers
    rows = dict.fromkeys(max(row, demand.context_tokens) for row in (LONGEST_ROW, demand.context_tokens))
    if wishes.micro_batch_tokens:
        rows = {wishes.micro_batch_tokens: None}
    given = wishes.gradient_checkpointing
    for recomputes in (False, True) if given is None else (given,):
        for sharding in shardings:
            if sharding == "offload" and not recomputes:
                continue  # the backward pass would keep every layer's weights
            for row in rows:
                yield recomputes, sharding, row


def _trainer_parts(
    request: Request, *, recomputes: bool, sharding: Sharding, row: int, gpus: GpuPlan
) -> dict[str, float]:
    """Bytes of a trainer process on its GPU."""
    if not request.gpu_wishes.has_trainer:
        return {}
    model, demand = request.model, request.demand
    scale = 2 if demand.is_float32 else 1
    layer = model.layer_parameters
    match sharding:
        case "none":
            held = model.parameters
        case "full" | "hybrid":  # one layer computes while the next one arrives
            split = model.decoder_parameters + model.vision_parameters
            held = split // gpus.num_trainer_processes + 2 * layer + model.embedding_parameters
        case "offload":
            held = 2 * layer + model.embedding_parameters + model.vision_parameters
    shared_by = request.wishes.context_parallel
    row = max(row, demand.context_tokens)  # a longer sequence gets a row of its own
    activations = scale * model.activation_bytes(row // shared_by, demand.lora_rank, recomputes=recomputes)
    if shared_by > 1:  # one layer's keys and values of all tokens: the parts, the whole, and its gradient twice
        activations += 4 * scale * row * model.kv_bytes_per_token(1) / model.num_layers
    return {
        "weights": _weight_bytes(demand) * held,
        **_optimizer_part(request, gpus),
        "activations": (1 + _FRAGMENTED) * activations,
        "CUDA": _CONTEXT,
    }


def _weight_bytes(demand: Demand) -> int:
    """Of each of the trainer's weights: trained ones are float32."""
    return BYTES_32 if demand.is_float32 or not demand.lora_rank else BYTES_16


def _optimizer_part(request: Request, gpus: GpuPlan) -> dict[str, float]:
    """What training adds to the weights: gradients and two moments in float32, and gradients in one message."""
    messages = 0 if gpus.num_trainer_processes == 1 else 1
    rank = request.demand.lora_rank
    if not rank:
        parts = {"gradients and optimizer": (3.0 + messages) * BYTES_32 * request.model.parameters}
        if not request.demand.is_float32:
            parts["weights for autocast"] = BYTES_16 * request.model.parameters
        return parts
    # the adapter itself, too, and copies of it for autocast
    return {"adapter and optimizer": (4.5 + messages) * BYTES_32 * request.model.lora_parameters(rank)}


def _sequence_bytes(request: Request, num_tokens: float, tensor_parallel: int) -> float:
    """Bytes that a server process keeps of one request on its GPU."""
    model = request.model
    scale = 2 if request.demand.serves_float32 else 1
    # the states of linear attention in use, and those from which the next turn goes on
    states = 2 * model.linear.state_bytes / tensor_parallel if model.linear else 0.0
    return scale * num_tokens * model.kv_bytes_per_token(tensor_parallel) + states


def _server_parts(request: Request, tensor_parallel: int) -> dict[str, float]:
    """Bytes of a server process on its GPU, without its KV cache."""
    model, demand = request.model, request.demand
    scale = 2 if demand.serves_float32 else 1
    is_fast = (request.machine.gpu_gib or 0.0) * GIB >= _FAST_GPU
    tokens = 8192 if is_fast else 2048
    language = tokens * (4 * model.intermediate * max(1, model.experts_per_token) + 16 * model.hidden)
    # the server tries out the largest image that the model takes: four patches per token
    image = 4 * demand.largest_image_tokens * BYTES_16 * (10 * model.vision_hidden + 2 * model.vision_intermediate)
    logits = 3 * BYTES_32 * (request.wishes.max_num_seqs or LARGEST_BATCH) * model.vocabulary
    features = model.feature_bytes(max(tokens, demand.largest_image_tokens))
    slot_rank = max_lora_rank(demand.lora_rank)  # vLLM's slots are of a few sizes
    return {
        "weights": scale * BYTES_16 * model.parameters / tensor_parallel,
        "adapters": scale * demand.num_adapters * BYTES_16 * model.lora_parameters(slot_rank) / tensor_parallel,
        "work space": scale * (max(language, image) + features) + logits,
        "CUDA": _CONTEXT + _GRAPHS,
    }


def _host_parts(request: Request, gpus: GpuPlan, sharding: Sharding) -> dict[str, float]:
    """Main memory of all processes on a machine with GPUs."""
    model, wishes = request.model, request.gpu_wishes
    parts: dict[str, float] = {}
    if wishes.has_trainer:
        number = gpus.num_trainer_processes
        # processes share the pages of the checkpoint's files, but each makes a copy in another precision than theirs;
        # weights that stay in main memory are held once more
        parts["loading"] = (number * BYTES_32 if request.demand.is_float32 else BYTES_16) * model.parameters
        if sharding == "offload":
            parts["weights"] = _weight_bytes(request.demand) * model.decoder_parameters
        parts["vision cache"] = number * request.demand.vision_cache_gib * GIB
        parts["trainer"] = number * _TRAINER_BASE
    if gpus.server_gpus:
        parts["server"] = len(gpus.server_copies) * _SERVER_BASE
        parts["image cache"] = _image_cache(request, gpus, beside=sum(parts.values()))
    return parts


def _image_cache(request: Request, gpus: GpuPlan, *, beside: float) -> float:
    """Main memory for the screenshots of all rollouts under way, as the servers keep them; at most half of what is left
    `beside` everything else.

    A server processes an image again with every turn if its cache is too small. The context bounds the image tokens of
    a prompt, whatever the size of its screenshots.
    """
    demand, there = request.demand, request.machine.host_gib
    prompt = demand.context_tokens * request.model.pixel_bytes_per_token
    least = len(gpus.server_copies) * max(_SMALLEST_IMAGE_CACHE, _LEAST_CACHED_PROMPTS * prompt)
    room = math.inf if there is None else (there * GIB - beside) / 2
    return max(least, min(demand.num_rollouts * prompt, room))


def _plan_on_cpu(request: Request) -> MemoryPlan:
    """Without GPUs everything is main memory, and weights are float32 unless the trainer is told otherwise."""
    model, demand, wishes = request.model, request.demand, request.wishes
    gpus = plan_gpus((), request.gpu_wishes, model.num_heads)
    row = wishes.micro_batch_tokens or max(LONGEST_ROW, demand.context_tokens)
    longest = max(row, demand.context_tokens)
    scale = 2 if demand.is_float32 else 1
    trainer, server = dict[str, float](), dict[str, float]()
    number = gpus.num_trainer_processes
    if request.gpu_wishes.has_server:
        server = {"weights": BYTES_32 * model.parameters, "KV cache": _KV_ON_CPU}
    recomputes = wishes.gradient_checkpointing or False
    if request.gpu_wishes.has_trainer:
        trainer = {
            "weights": _weight_bytes(demand) * model.parameters,
            **_optimizer_part(request, gpus),
        }
        if wishes.gradient_checkpointing is None and request.machine.host_gib is not None:
            left = request.machine.host_gib * GIB - sum(server.values()) - number * sum(trainer.values())
            whole = model.activation_bytes(longest, demand.lora_rank, recomputes=False)
            recomputes = number * scale * whole > left
        trainer["activations"] = scale * model.activation_bytes(longest, demand.lora_rank, recomputes=recomputes)
    weights = server.get("weights", 0.0) + number * trainer.get("weights", 0.0)
    others = sum(server.values()) + number * sum(trainer.values()) - weights
    host = {"weights": weights, "others": others, "vision cache": number * demand.vision_cache_gib * GIB}
    if server:
        host["image cache"] = _image_cache(request, gpus, beside=sum(host.values()))
    return MemoryPlan(
        machine=request.machine,
        gpus=gpus,
        gradient_checkpointing=recomputes,
        micro_batch_tokens=row,
        sharding=wishes.sharding or "none",
        max_num_seqs=wishes.max_num_seqs or LARGEST_BATCH,
        trainer=trainer,
        server=server,
        host=host,
    )


def _plan_unmeasured(request: Request) -> MemoryPlan:
    """GPUs whose memory the driver does not say: settings that save memory, and no check."""
    wishes = request.wishes
    gpus = plan_gpus(request.machine.gpus, request.gpu_wishes, request.model.num_heads)
    recomputes = True if wishes.gradient_checkpointing is None else wishes.gradient_checkpointing
    row = wishes.micro_batch_tokens or max(LONGEST_ROW, request.demand.context_tokens)
    sharding = wishes.sharding or "none"
    return MemoryPlan(
        machine=request.machine,
        gpus=gpus,
        gradient_checkpointing=recomputes,
        micro_batch_tokens=row,
        sharding=sharding,
        max_num_seqs=wishes.max_num_seqs or LARGEST_BATCH,
        trainer=_trainer_parts(request, recomputes=recomputes, sharding=sharding, row=row, gpus=gpus),
        server=_server_parts(request, gpus.tensor_parallel) if gpus.server_gpus else {},
        host=_host_parts(request, gpus, sharding),
    )


def _refusal(request: Request) -> str:
    """What is too large, and what would make it fit."""
    gpus = plan_gpus(request.machine.gpus, request.gpu_wishes, request.model.num_heads)
    sizes = [
        sum(_trainer_parts(request, recomputes=recomputes, sharding=sharding, row=row, gpus=gpus).values())
        for recomputes, sharding, row in _ways_to_train(request, gpus)
    ]
    trainer = min(sizes, default=0.0)
    server = 0.0
    if gpus.server_gpus:
        largest = max(size or 1 for size in _tensor_parallel_sizes(request))
        kv_cache = _sequence_bytes(request, request.demand.context_tokens, largest)
        server = sum(_server_parts(request, largest).values()) + kv_cache
    remedies = list(_remedies(request))
    there = f"{len(request.machine.gpus)} GPUs of {_shown(request.machine.gpu_gib)} GiB"
    needs = {"trainer": trainer if gpus.trainer_gpus else 0.0, "server": server}
    needed = " and ".join(f"a {name} of at least {_shown(size / GIB)} GiB" for name, size in needs.items() if size)
    together = ", on the same GPU" if gpus.is_shared else ""
    share = f" (server up to {ALONE_UTILIZATION:.0%})" if server else ""
    return (
        f"memory: expected {needed} per GPU{together}, to fit with a context of {request.demand.context_tokens} "
        f"tokens, got {there}{share}; "
        + (f"it fits with {', or with '.join(remedies[:3])}" if remedies else "choose a smaller model")
    )


def _remedies(request: Request) -> Iterator[str]:
    """Settings with which the plan fits, changed one at a time."""
    wishes, gpu_wishes, demand, machine = request.wishes, request.gpu_wishes, request.demand, request.machine
    by_hand = {
        "trainer.gradient_checkpointing": replace(request, wishes=replace(wishes, gradient_checkpointing=None)),
        "trainer.micro_batch_tokens": replace(request, wishes=replace(wishes, micro_batch_tokens=None)),
        "trainer.sharding": replace(request, wishes=replace(wishes, sharding=None)),
        "server.max_num_seqs": replace(request, wishes=replace(wishes, max_num_seqs=None)),
        "server.tensor_parallel": replace(request, gpu_wishes=replace(gpu_wishes, server_tensor_parallel=None)),
        "server.gpu_memory_utilization": replace(request, gpu_wishes=replace(gpu_wishes, gpu_memory_utilization=None)),
        "trainer.num_processes": replace(request, gpu_wishes=replace(gpu_wishes, trainer_num_processes=None)),
        "server.gpus and trainer.gpus": replace(
            request, gpu_wishes=replace(gpu_wishes, server_gpus=None, trainer_gpus=None)
        ),
        "trainer.dtype=bfloat16": replace(request, demand=replace(demand, is_float32=False)),
    }
    for name, other in by_hand.items():
        if other != request and _find_plan(other) is not None:
            yield name if "=" in name else f"{name} left out"
    shorter = range((demand.context_tokens - 1) // 1024 * 1024, _SMALLEST_CONTEXT - 1, -1024)
    for tokens in () if demand.is_context_fixed else shorter:
        if _find_plan(replace(request, demand=replace(demand, context_tokens=tokens))) is not None:
            yield f"server.max_model_len={tokens}"
            break
    placed = gpu_wishes.server_gpus is not None or gpu_wishes.trainer_gpus is not None
    for number in () if placed else (2, 4, 8, 16):
        more = replace(machine, gpus=tuple(map(str, range(number))))
        if number > len(machine.gpus) and _find_plan(replace(request, machine=more)) is not None:
            yield f"{number} GPUs"
            break
    for gib in _GPU_SIZES:
        if gib <= (machine.gpu_gib or 0.0):
            continue
        if _find_plan(replace(request, machine=replace(machine, gpu_gib=float(gib)))) is not None:
            yield f"GPUs of {gib} GiB"
            break


def _shown(gib: float | None) -> str:
    return "unknown" if gib is None else f"{gib:.1f}"
