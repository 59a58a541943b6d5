"""Estimates the memory of model server and trainer before anything is loaded, and refuses what cannot fit.

The estimate is arithmetic on the model's dimensions and the machine's size: no torch, no GPU. It chooses what was not
set by hand, the fastest way that fits first: recomputed activations, sharding, rows of tokens, tensor parallelism, the
server's share of a GPU, and its batch size. A refusal names settings that fit, each of them tried.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from cua_rl.command_line.fields import with_values
from cua_rl.machine.gpus import GpuPlacement
from cua_rl.machine.machine import Machine
from cua_rl.machine.memory_parts import (
    GIB,
    KEPT_ATTENTION,
    SPARE,
    Request,
    WayToTrain,
    cached_prefix,
    host_parts,
    image_cache_bytes,
    optimizer_part,
    outside_bytes,
    sequence_bytes,
    server_parts,
    trainer_parts,
    usable_bytes,
    vision_cache_bytes,
    weight_bytes,
)
from cua_rl.machine.model_sizes import BYTES_32
from cua_rl.machine.prefix_cache import ENOUGH_KEPT, LARGEST_NUM_ROLLOUTS, most_rollouts
from cua_rl.sampling.config import DEFAULT_NUM_SEQS, GPU_MEMORY_UTILIZATION, ServerConfig
from cua_rl.training.config import ROW_TOKENS, VISION_CACHE_GIB, Sharding, TrainerConfig
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

_NUM_CONTEXTS = (8, 4, 2, 1)  # full contexts in the KV cache, as many as there is room for: twice as many rollouts
_KV_ON_CPU = 1.0 * GIB
_GPU_SIZES = (24, 32, 40, 48, 80, 96, 141, 192)
_SMALLEST_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Chosen settings, and the bytes that follow from them, per process of each kind."""

    machine: Machine
    gpus: GpuPlacement
    gradient_checkpointing: bool
    micro_batch_tokens: int
    sharding: Sharding
    max_num_seqs: int
    trainer: Mapping[str, float]
    server: Mapping[str, float]
    host: Mapping[str, float]  # main memory of all processes together
    num_rollouts: int = LARGEST_NUM_ROLLOUTS
    kept_prefix_frac: float | None = None  # of what an unlimited prefix cache finds, if there is a server

    @property
    def trainer_fraction(self) -> float:
        """Of its GPU, what a trainer process may allocate beside its context, the server, and what stays free."""
        if not self.trainer or not self.machine.gpus or self.machine.gpu_gib is None:
            return 1.0
        gpu = usable_bytes(self.machine.gpu_gib)
        server = self.gpus.gpu_memory_utilization * gpu + outside_bytes(self.gpus.tensor_parallel)
        beside = outside_bytes(self.gpus.num_trainer_processes) + (server if self.gpus.is_shared else 0.0)
        return 1 - SPARE - beside / gpu

    @property
    def keeps_attention(self) -> bool:
        """Whether the results of attention are kept where the rest is recomputed."""
        return KEPT_ATTENTION in self.trainer

    @property
    def vision_cache_gib(self) -> float:
        """Cache of each trainer process for the features of screenshots."""
        return self.host["vision cache"] / self.gpus.num_trainer_processes / GIB if self.trainer else VISION_CACHE_GIB

    @property
    def image_cache_gib(self) -> float:
        """Cache of each copy of the model server for processed screenshots."""
        return self.host.get("image cache", 0.0) / len(self.gpus.server_copies) / GIB

    def fill_server(self, server: ServerConfig) -> ServerConfig:
        """The server's settings with the chosen values."""
        return with_values(
            server,
            max_num_seqs=self.max_num_seqs,
            image_cache_gib=self.image_cache_gib,
            gpu_names=self.gpus.server_gpus,
            tensor_parallel=self.gpus.tensor_parallel,
            gpu_memory_utilization=self.gpus.gpu_memory_utilization,
        )

    def fill_trainer(self, trainer: TrainerConfig) -> TrainerConfig:
        """The trainer's settings with the chosen values."""
        cache_gib = trainer.vision_cache_gib
        return with_values(
            trainer,
            gradient_checkpointing=self.gradient_checkpointing,
            micro_batch_tokens=self.micro_batch_tokens,
            sharding=self.sharding,
            keeps_attention=self.keeps_attention,
            num_processes=self.gpus.num_trainer_processes if trainer.num_nodes is None else trainer.num_processes,
            gpu_names=self.gpus.trainer_gpus,
            memory_fraction=self.trainer_fraction,
            vision_cache_gib=self.vision_cache_gib if cache_gib is None else cache_gib,
        )

    def table(self) -> str:
        """The estimate as text."""
        gpus, host_gib = self.machine.gpus, _shown(self.machine.host_gib)
        where = "GPU" if gpus else "process"
        kind = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {_shown(self.machine.gpu_gib)}" if gpus else "no GPU"
        lines = [f"memory estimate, GiB: {kind}, main memory {host_gib}"]
        columns = {f"trainer, per {where}": self.trainer, f"server, per {where}": self.server, "main memory": self.host}
        for title, parts in columns.items():
            if parts:
                shown = ", ".join(f"{name} {_shown(size / GIB)}" for name, size in parts.items())
                lines.append(f"  {title}: {_shown(sum(parts.values()) / GIB)} = {shown}")
        if self.kept_prefix_frac is not None:
            lines.append(f"  rollouts at a time: {self.num_rollouts}; {self.kept_prefix_frac:.0%} of prefixes kept")
        chosen = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return "\n".join([*lines, f"  {chosen}"])

    def summary(self) -> str:
        """What is needed, on one line."""
        columns = {"trainer": self.trainer, "model server": self.server, "main memory": self.host}
        needed = [f"{title} {_shown(sum(parts.values()) / GIB)}" for title, parts in columns.items() if parts]
        gpus = self.machine.gpus
        kind = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {_shown(self.machine.gpu_gib)}" if gpus else "no GPU"
        where = " (the first two per GPU)" if gpus else ""
        return f"GiB: {', '.join(needed)}{where}; of {kind}, main memory {_shown(self.machine.host_gib)}"

    def effective(self) -> dict[str, object]:
        """The estimate as config.json and the dry run show it."""
        parts = {"trainer": self.trainer, "server": self.server, "main_memory": self.host}
        gib = {title: {name: round(size / GIB, 2) for name, size in part.items()} for title, part in parts.items()}
        kept = {} if self.kept_prefix_frac is None else {"prefix_kept_frac": round(self.kept_prefix_frac, 3)}
        return {"memory_plan": {"settings": self._settings(), "gib": gib, **kept}, **self.gpus.effective()}

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


def plan_memory(request: Request) -> MemoryBudget:
    """The fastest choice that fits; raises `ConfigError`, with settings that would help, if none does."""
    plan = _plan_rollouts(request)
    if plan is None:
        raise ConfigError(_refusal(request))
    weights, loading = plan.host.get("weights", 0.0), plan.host.get("loading", 0.0)
    there = request.machine.host_gib
    # pages of the checkpoint's files are evicted for what is pinned, but not for each other while a process reads
    pinned = sum(plan.host.values()) - loading if plan.sharding == "offload" else 0.0
    if there is not None and max(weights + loading, pinned) > there * GIB:
        raise ConfigError(
            f"memory: expected {_shown((weights + loading) / GIB)} GiB of main memory for the weights that its "
            f"processes load, and {_shown(sum(plan.host.values()) / GIB)} in all, got {_shown(there)}; choose a "
            "smaller model, or fewer trainer.num_processes"
        )
    return plan


def _plan_rollouts(request: Request) -> MemoryBudget | None:
    """As many rollouts at a time as the KV cache holds, if their number was not set; warns of too many."""
    wanted, shape = request.num_rollouts, request.shape
    request = replace(request, num_rollouts=wanted or LARGEST_NUM_ROLLOUTS)
    plan = _find_plan(request)
    if plan is None:
        return None
    if request.has_trainer:
        _require_sharding(request.trainer.sharding, plan.gpus.num_trainer_processes)
    _require_whole_heads(request.model.num_kv_heads, plan.gpus.tensor_parallel)
    kv_cache = plan.server.get("KV cache", 0.0)
    if shape is None or not kv_cache:
        return replace(plan, num_rollouts=request.num_rollouts)
    find = partial(cached_prefix, request, plan.gpus, kv_cache=kv_cache, shape=shape)
    most = most_rollouts(lambda number: find(num_rollouts=number))
    kept = find(num_rollouts=wanted or most)
    if kept < ENOUGH_KEPT:
        logger.warning(
            "max_concurrent_rollouts=%d: the KV cache keeps %.0f %% of the prompts of this many rollouts until the "
            "next turn, and the server computes the others again; with %d it keeps %.0f %%",
            *(wanted or most, 100 * kept, most, 100 * find(num_rollouts=most)),
        )
    plan = _find_plan(replace(request, num_rollouts=wanted or most))
    return None if plan is None else replace(plan, num_rollouts=wanted or most, kept_prefix_frac=kept)


def _require_sharding(wanted: Sharding | None, num_processes: int) -> None:
    """Raise `ConfigError` for a sharding that does not suit the number of processes."""
    if wanted == "full" and num_processes == 1:
        raise ConfigError(
            "trainer.sharding: expected 'replicated' with one trainer process, which holds the whole model, got 'full'"
            "; set trainer.num_processes, or name several trainer.gpus"
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


def _find_plan(request: Request) -> MemoryBudget | None:
    if not request.machine.gpus:
        return _plan_on_cpu(request)
    if request.machine.gpu_gib is None:
        return _plan_unmeasured(request)
    for tensor_parallel in _tensor_parallel_sizes(request):
        gpus = replace(request, server=with_values(request.server, tensor_parallel=tensor_parallel)).gpus()
        for num_contexts in _NUM_CONTEXTS:
            plan = _fill_gpus(request, gpus, num_contexts)
            if plan is not None:
                return plan
    return None


def _tensor_parallel_sizes(request: Request) -> Iterator[int | None]:
    """Possible numbers of GPUs per copy of the server's model, the smallest first: more copies are faster."""
    wanted, gpus = request.server.tensor_parallel, request.gpus()
    if wanted is not None or not gpus.server_gpus:
        yield wanted
        return
    size = 1
    while len(gpus.server_gpus) % size == 0 and request.model.num_heads % size == 0:
        yield size
        size *= 2


def _fill_gpus(request: Request, gpus: GpuPlacement, num_contexts: int) -> MemoryBudget | None:
    """The first way to train that leaves the server room for `num_contexts` full contexts."""
    gpu = usable_bytes(request.machine.gpu_gib or 0.0)
    kept, outside = (1 - SPARE) * gpu, outside_bytes(gpus.tensor_parallel)
    fixed = server_parts(request, gpus.tensor_parallel) if gpus.server_gpus else {}
    context = request.context_tokens
    contexts = num_contexts * sequence_bytes(request, context, gpus.tensor_parallel)
    least = sum(fixed.values()) - outside + contexts if fixed else 0.0  # of vLLM's share
    for way in _ways_to_train(request, gpus):
        trainer = trainer_parts(request, way, gpus)
        trainer_total = sum(trainer.values())
        utilization = request.server.gpu_memory_utilization
        if utilization is None:
            left = kept - outside - (trainer_total if gpus.is_shared else 0.0)
            utilization = max(0.0, min(GPU_MEMORY_UTILIZATION, math.floor(100 * left / gpu) / 100))
        room = kept - (utilization * gpu + outside if gpus.is_shared else 0.0)
        if trainer_total > room or least > utilization * gpu:
            continue
        server, max_num_seqs = dict(fixed), request.server.max_num_seqs or DEFAULT_NUM_SEQS
        if fixed:
            server["KV cache"] = utilization * gpu + outside - sum(fixed.values())
            halves = int(server["KV cache"] / sequence_bytes(request, context / 2, gpus.tensor_parallel))
            max_num_seqs = request.server.max_num_seqs or max(1, min(DEFAULT_NUM_SEQS, halves))
        return MemoryBudget(
            machine=request.machine,
            gpus=replace(gpus, gpu_memory_utilization=utilization),
            gradient_checkpointing=way.recomputes,
            micro_batch_tokens=way.row,
            sharding=way.sharding,
            max_num_seqs=max_num_seqs,
            trainer=trainer,
            server=server,
            host=host_parts(request, gpus, way.sharding),
        )
    return None


def _ways_to_train(request: Request, gpus: GpuPlacement) -> Iterator[WayToTrain]:
    """The fastest first. On a shared GPU, the KV cache gets what kept attention would take: it runs more rollouts."""
    trainer, context = request.trainer, request.context_tokens
    shardings: list[Sharding] = ["replicated", "full"] if gpus.num_trainer_processes > 1 else ["replicated", "offload"]
    if trainer.sharding is not None:
        shardings = [trainer.sharding]
    elif trainer.adapts_vision:
        shardings = ["replicated"]
    elif request.model.num_experts or not trainer.lora_rank:
        shardings = [one for one in shardings if one != "offload"]  # which is for frozen linear layers, not for experts
    rows = dict.fromkeys(max(row, context) for row in (ROW_TOKENS, context))
    if trainer.micro_batch_tokens:
        rows = {trainer.micro_batch_tokens: None}
    given = trainer.gradient_checkpointing
    for recomputes in (False, True) if given is None else (given,):
        for sharding in shardings:
            if sharding == "offload" and not recomputes:
                continue  # the backward pass would keep every layer's weights
            keeps = (True, False) if recomputes and not gpus.is_shared else (False,)
            for keeps_attention, row in product(keeps, rows):
                yield WayToTrain(recomputes=recomputes, keeps_attention=keeps_attention, sharding=sharding, row=row)


def _plan_on_cpu(request: Request) -> MemoryBudget:
    """Without GPUs everything is main memory, and weights are float32 unless the trainer's dtype is set."""
    model, wanted, gpus = request.model, request.trainer, request.gpus()
    row = wanted.micro_batch_tokens or max(ROW_TOKENS, request.context_tokens)
    longest = max(row, request.context_tokens)
    scale = 2 if request.is_float32 else 1
    trainer, server = dict[str, float](), dict[str, float]()
    number = gpus.num_trainer_processes
    if request.has_server:
        server = {"weights": BYTES_32 * model.parameters, "KV cache": _KV_ON_CPU}
    recomputes = wanted.gradient_checkpointing or False
    if request.has_trainer:
        trainer = {
            "weights": weight_bytes(request) * model.parameters,
            **optimizer_part(request, gpus, model.parameters, model.parameters),
        }
        if wanted.gradient_checkpointing is None and request.machine.host_gib is not None:
            left = request.machine.host_gib * GIB - sum(server.values()) - number * sum(trainer.values())
            whole = model.activation_bytes(longest, wanted.lora_rank, recomputes=False)
            recomputes = number * scale * whole > left
        trainer["activations"] = scale * model.activation_bytes(longest, wanted.lora_rank, recomputes=recomputes)
    weights = server.get("weights", 0.0) + number * trainer.get("weights", 0.0)
    others = sum(server.values()) + number * sum(trainer.values()) - weights
    host = {"weights": weights, "others": others, "vision cache": vision_cache_bytes(request, gpus)}
    if server:
        host["image cache"] = image_cache_bytes(request, gpus, beside=sum(host.values()))
    return MemoryBudget(
        machine=request.machine,
        gpus=gpus,
        gradient_checkpointing=recomputes,
        micro_batch_tokens=row,
        sharding=wanted.sharding or "replicated",
        max_num_seqs=request.server.max_num_seqs or DEFAULT_NUM_SEQS,
        trainer=trainer,
        server=server,
        host=host,
    )


def _plan_unmeasured(request: Request) -> MemoryBudget:
    """GPUs whose memory the driver does not say: settings that save memory, and no check."""
    wanted, gpus = request.trainer, request.gpus()
    recomputes = True if wanted.gradient_checkpointing is None else wanted.gradient_checkpointing
    row = wanted.micro_batch_tokens or max(ROW_TOKENS, request.context_tokens)
    sharding = wanted.sharding or "replicated"
    way = WayToTrain(recomputes=recomputes, keeps_attention=False, sharding=sharding, row=row)
    return MemoryBudget(
        machine=request.machine,
        gpus=gpus,
        gradient_checkpointing=recomputes,
        micro_batch_tokens=row,
        sharding=sharding,
        max_num_seqs=request.server.max_num_seqs or DEFAULT_NUM_SEQS,
        trainer=trainer_parts(request, way, gpus),
        server=server_parts(request, gpus.tensor_parallel) if gpus.server_gpus else {},
        host=host_parts(request, gpus, sharding),
    )


def _refusal(request: Request) -> str:
    """What is too large, and what would make it fit."""
    gpus = request.gpus()
    sizes = [sum(trainer_parts(request, way, gpus).values()) for way in _ways_to_train(request, gpus)]
    trainer = min(sizes, default=0.0)
    server = 0.0
    if gpus.server_gpus:
        largest = max(size or 1 for size in _tensor_parallel_sizes(request))
        kv_cache = sequence_bytes(request, request.context_tokens, largest)
        server = sum(server_parts(request, largest).values()) + kv_cache
    remedies = list(_remedies(request))
    there = f"{len(request.machine.gpus)} GPUs of {_shown(request.machine.gpu_gib)} GiB"
    needs = {"trainer": trainer if gpus.trainer_gpus else 0.0, "server": server}
    needed = " and ".join(f"a {name} of at least {_shown(size / GIB)} GiB" for name, size in needs.items() if size)
    together = ", on the same GPU" if gpus.is_shared else ""
    share = f" (server up to {GPU_MEMORY_UTILIZATION:.0%})" if server else ""
    return (
        f"memory: expected {needed} per GPU{together}, to fit with a context of {request.context_tokens} "
        f"tokens, got {there}{share}; "
        + (f"it fits with {', or with '.join(remedies[:3])}" if remedies else "choose a smaller model")
    )


def _remedies(request: Request) -> Iterator[str]:
    """Settings that fit, changed one at a time."""
    server, trainer, machine = request.server, request.trainer, request.machine
    by_hand = {
        f"trainer.{name} left out": replace(request, trainer=with_values(trainer, **{name: None}))
        for name in ("gradient_checkpointing", "micro_batch_tokens", "sharding", "num_processes")
    }
    by_hand |= {
        f"server.{name} left out": replace(request, server=with_values(server, **{name: None}))
        for name in ("max_num_seqs", "tensor_parallel", "gpu_memory_utilization")
    }
    by_hand["server.gpus and trainer.gpus left out"] = replace(
        request, server=with_values(server, gpus=None), trainer=with_values(trainer, gpus=None)
    )
    dtype = "bfloat16" if request.is_float32 else trainer.dtype
    by_hand["trainer.dtype=bfloat16"] = replace(request, trainer=with_values(trainer, dtype=dtype))
    for name, other in by_hand.items():
        if other != request and _fits(other):
            yield name
    shorter = range((request.context_tokens - 1) // 1024 * 1024, _SMALLEST_CONTEXT - 1, -1024)
    for tokens in () if request.is_context_fixed else shorter:
        if _fits(replace(request, context_tokens=tokens)):
            yield f"server.max_model_len={tokens}"
            break
    placed = server.gpus is not None or trainer.gpus is not None
    for number in () if placed else (2, 4, 8, 16):
        more = replace(machine, gpus=tuple(map(str, range(number))))
        if number > len(machine.gpus) and _fits(replace(request, machine=more)):
            yield f"{number} GPUs"
            break
    for gib in _GPU_SIZES:
        if gib <= (machine.gpu_gib or 0.0):
            continue
        if _fits(replace(request, machine=replace(machine, gpu_gib=float(gib)))):
            yield f"GPUs of {gib} GiB"
            break


def _fits(request: Request) -> bool:
    """Whether anything fits; other settings made by hand may rule the changed one out."""
    try:
        return _find_plan(request) is not None
    except ConfigError:
        return False


def _shown(gib: float | None) -> str:
    return "unknown" if gib is None else f"{gib:.1f}"
