"""Finds the GPUs of this machine, and assigns them to the model server and the trainer."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cua_rl.errors import ConfigError, CuaError, boundary
from cua_rl.sampling.vllm_command import Platform

ALONE_UTILIZATION = 0.85
SHARED_UTILIZATION = 0.45
"""The trainer holds the model a second time, and its activations."""
_WSL_FOLDER = "/usr/lib/wsl/lib"
_ASK_TIMEOUT_S = 60.0  # without its persistence mode, the driver initialises one GPU after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that a process here may use."""

    name: str
    """Its name in CUDA_VISIBLE_DEVICES."""
    memory_gib: float | None = None
    """None if the driver does not report it: for a slice of a GPU (MIG), or memory shared with the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The GPUs of server and trainer, by their names in CUDA_VISIBLE_DEVICES; empty tuples without GPUs."""

    server_gpus: tuple[str, ...]
    trainer_gpus: tuple[str, ...]
    """One process each; without GPUs, `num_trainer_processes` share the CPU."""
    num_trainer_processes: int
    tensor_parallel: int
    """GPUs that hold one copy of the server's model together."""
    gpu_memory_utilization: float

    @property
    def is_shared(self) -> bool:
        """Whether server and trainer use the same GPUs."""
        return bool(set(self.server_gpus) & set(self.trainer_gpus))

    @property
    def server_copies(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs of each copy of the server's model; a single copy without GPUs."""
        starts = range(0, len(self.server_gpus), self.tensor_parallel)
        return tuple(self.server_gpus[start : start + self.tensor_parallel] for start in starts) or ((),)

    def effective(self) -> dict[str, object]:
        """The plan as config.json and the dry run show it."""
        server = {
            "gpus": list(self.server_gpus),
            "tensor_parallel": self.tensor_parallel,
            "copies": len(self.server_copies),
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


def ask_nvidia_smi(fields: str = "index,uuid,memory.total", search_path: str | None = None) -> str:
    """What NVML (NVIDIA's management library) says of every GPU here, a line of `fields` each; "" without GPUs.

    Unlike /proc/driver/nvidia, it works inside WSL2, and lists only the GPUs that a container was given.
    """
    try:
        return query_gpus(fields, search_path)
    except ConfigError:
        return ""


def query_gpus(fields: str, search_path: str | None = None) -> str:
    """A line of `fields` for every GPU; raises as `run_nvidia_smi` does."""
    return run_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", search_path=search_path)


def run_nvidia_smi(*arguments: str, search_path: str | None = None) -> str:
    """What nvidia-smi prints; raises `ConfigError` without a driver that works, and `CuaError` if it hangs."""
    folders = (search_path or os.environ.get("PATH", os.defpath), _WSL_FOLDER)
    program = shutil.which("nvidia-smi", path=os.pathsep.join(folders))
    if program is None:
        raise ConfigError("expected nvidia-smi in PATH, got none; on a machine with a GPU, install NVIDIA's driver")
    with boundary(CuaError, "nvidia-smi, which waits for the driver (see dmesg, or restart the machine)"):
        command = [program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"expected nvidia-smi to answer, got {said!r}; repair or update NVIDIA's driver")
    return done.stdout


def visible_gpus(environ: Mapping[str, str], ask: Callable[[], str] = ask_nvidia_smi) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that a process here may use; no torch needed.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names a GPU that is not here.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    if names == []:
        return ()
    rows = [[field.strip() for field in line.split(",")] for line in ask().splitlines()]
    memory_gib = {row[0]: float(row[2]) / 1024 if row[2].isdecimal() else None for row in rows}
    if names is None:
        return tuple(Gpu(name=index, memory_gib=gib) for index, gib in memory_gib.items())
    uuids = {row[1]: row[0] for row in rows}
    for name in names:
        if not rows or (name.isdecimal() and name not in memory_gib):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES: expected GPUs that are here ({', '.join(memory_gib) or 'none'}), got "
                f"{visible!r}; correct it, make it empty to compute on the CPU, or see what nvidia-smi says"
            )
    # a UUID may be cut short
    found = [next((index for uuid, index in uuids.items() if uuid.startswith(name)), name) for name in names]
    return tuple(Gpu(name=name, memory_gib=memory_gib.get(index)) for name, index in zip(names, found, strict=True))


def require_platform(gpus: GpuPlan, platform: Platform | None) -> None:
    """Raise `ConfigError` unless the installed vLLM computes where the plan wants its server; None: none is installed.

    Otherwise a server for CPUs would silently leave its GPUs idle.
    """
    if platform == "cpu" and gpus.server_gpus:
        raise ConfigError(
            f"server.gpus: expected vLLM for CUDA, as GPUs are here ({', '.join(gpus.server_gpus)}), got its build for "
            "CPUs; run set-up again (make setup), or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    if platform == "cuda" and not gpus.server_gpus:
        raise ConfigError(
            "server.gpus: expected a GPU for the installed vLLM, which computes with CUDA, got none; see whether "
            "nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"
        )


def plan_gpus(names: Sequence[str], wishes: GpuWishes, num_heads: int) -> GpuPlan:
    """Split the GPUs called `names` between server and trainer; raises `ConfigError` for wishes that cannot be met.

    One GPU is shared. Of several the server gets the first, the largest power of two that is at most half of them, and
    the trainer gets the others. If only one side is configured, the other side gets the remaining GPUs.
    Each GPU of the server holds a copy of the model, unless they are to hold it together.
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
    default = SHARED_UTILIZATION if set(server) & set(trainer) else ALONE_UTILIZATION
    return GpuPlan(
        server_gpus=tuple(names[index] for index in server),
        trainer_gpus=tuple(names[index] for index in trainer),
        num_trainer_processes=num_processes,
        tensor_parallel=wanted or 1,
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
        if not wishes.has_trainer:
            return [], []
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
    """The GPUs that remain, or the same ones if none do."""
    return [index for index in everything if index not in taken] or taken
