"""Assigns GPUs to the model server and the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cua_rl.errors import ConfigError

ALONE_UTILIZATION = 0.85
SHARED_UTILIZATION = 0.45
"""The trainer holds the model a second time, and its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """GPUs under the names that CUDA_VISIBLE_DEVICES has for them; empty tuples where there are none."""

    server_gpus: tuple[str, ...]
    trainer_gpus: tuple[str, ...]
    """One process each; without GPUs, `num_trainer_processes` share the CPU."""
    num_trainer_processes: int
    tensor_parallel: int
    """GPUs that hold one copy of the server's model together."""
    data_parallel: int
    """Copies of the server's model."""
    gpu_memory_utilization: float

    @property
    def is_shared(self) -> bool:
        """Whether server and trainer use the same GPUs."""
        return bool(set(self.server_gpus) & set(self.trainer_gpus))

    def effective(self) -> dict[str, object]:
        """The plan as config.json and the dry run show it."""
        server = {
            "gpus": list(self.server_gpus),
            "tensor_parallel": self.tensor_parallel,
            "data_parallel": self.data_parallel,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        trainer = {"gpus": list(self.trainer_gpus), "num_processes": self.num_trainer_processes}
        return {"gpu_plan": {"server": server, "trainer": trainer}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWishes:
    """Configured GPUs, counted from 0 among the visible ones; None leaves the choice to `plan_gpus`."""

    server_gpus: Sequence[int] | None = None
    server_tensor_parallel: int | None = None
    gpu_memory_utilization: float | None = None
    trainer_gpus: Sequence[int] | None = None
    trainer_num_processes: int | None = None
    has_server: bool = True
    """Whether the run starts a server of its own."""
    has_trainer: bool = True


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that a process here may use; no torch needed."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(index) for index in range(len(list(devices.iterdir())) if devices.is_dir() else 0))


def plan_gpus(names: Sequence[str], wishes: GpuWishes, num_heads: int) -> GpuPlan:
    """Split the GPUs called `names` between server and trainer; raises `ConfigError` for wishes that cannot be met.

    One GPU is shared. Of several the server gets the first, the largest power of two that is at most half of them, and
    the trainer gets the others. If only one side is configured, the other side gets the remaining GPUs.
    """
    for key, indices in (("server.gpus", wishes.server_gpus), ("trainer.gpus", wishes.trainer_gpus)):
        if indices is None:
            continue
        there = f"GPUs of 0 to {len(names) - 1}, each once" if names else "None, as no GPU is visible here"
        if not indices or len(set(indices)) < len(indices) or not all(0 <= index < len(names) for index in indices):
            raise ConfigError(
                f"{key}: expected {there}, got {list(indices)!r}; count GPUs from 0 among those of "
                "CUDA_VISIBLE_DEVICES, or leave it out"
            )
    server, trainer = _split(len(names), wishes)
    if set(server) & set(trainer) and set(server) != set(trainer):
        raise ConfigError(
            f"server.gpus, trainer.gpus: expected GPUs of their own, or the same for both, got {server!r} and "
            f"{trainer!r}; let them overlap wholly or not at all"
        )
    num_processes = wishes.trainer_num_processes or max(1, len(trainer))
    if trainer and num_processes > len(trainer):
        raise ConfigError(
            f"trainer.num_processes: expected at most {len(trainer)}, one per GPU of the trainer, got {num_processes}; "
            "lower it, or name more trainer.gpus"
        )
    trainer = trainer[:num_processes]
    wanted = wishes.server_tensor_parallel
    if wanted is not None and (len(server) % wanted or num_heads % wanted or wanted > max(1, len(server))):
        raise ConfigError(
            f"server.tensor_parallel: expected a number that divides the server's {len(server)} GPUs and the model's "
            f"{num_heads} attention heads, got {wanted}; change it, or leave it out"
        )
    # as many GPUs per copy as divide both the GPUs and, being a power of two, the heads of the usual models
    tensor_parallel = wanted or max(1, len(server) & -len(server))
    default = SHARED_UTILIZATION if set(server) & set(trainer) else ALONE_UTILIZATION
    return GpuPlan(
        server_gpus=tuple(names[index] for index in server),
        trainer_gpus=tuple(names[index] for index in trainer),
        num_trainer_processes=num_processes,
        tensor_parallel=tensor_parallel,
        data_parallel=max(1, len(server) // tensor_parallel),
        gpu_memory_utilization=wishes.gpu_memory_utilization or default,
    )


def _split(num_gpus: int, wishes: GpuWishes) -> tuple[list[int], list[int]]:
    everything = list(range(num_gpus))
    server, trainer = wishes.server_gpus, wishes.trainer_gpus
    if not wishes.has_server:
        if server is not None or wishes.server_tensor_parallel is not None:
            raise ConfigError(
                "server.gpus, server.tensor_parallel: expected None with base_url, whose server has been started "
                f"already, got {server!r} and {wishes.server_tensor_parallel!r}; leave them out"
            )
        return [], everything if trainer is None else list(trainer)
    if not wishes.has_trainer:
        return everything if server is None else list(server), []
    if server is None and trainer is None:
        # of several, the largest power of two that is at most half of them
        server = everything[: 1 << ((num_gpus // 2).bit_length() - 1)] if num_gpus > 1 else everything
    if server is None:
        server = _others(everything, trainer or ())
    if trainer is None:
        trainer = _others(everything, server)
    return list(server), list(trainer)


def _others(everything: Sequence[int], taken: Sequence[int]) -> Sequence[int]:
    """The GPUs that are left, or the same if none is."""
    return [index for index in everything if index not in taken] or taken
