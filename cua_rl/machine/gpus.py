"""Finds the GPUs of this machine, and assigns them to the model server and the trainer."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cua_rl.sampling.config import GPU_MEMORY_UTILIZATION, ServerConfig
from cua_rl.sampling.vllm_command import Platform
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError, CuaError, boundary

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
class GpuPlacement:
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
        return copies_of(self.server_gpus, self.tensor_parallel)

    def effective(self) -> dict[str, object]:
        """The placement as config.json and the dry run show it."""
        server = {
            "gpus": list(self.server_gpus),
            "tensor_parallel": self.tensor_parallel,
            "copies": len(self.server_copies),
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        trainer = {"gpus": list(self.trainer_gpus), "num_processes": self.num_trainer_processes}
        return {"gpu_plan": {"server": server, "trainer": trainer}}


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
                f"CUDA_VISIBLE_DEVICES: expected GPUs of this machine ({', '.join(memory_gib) or 'none'}), got "
                f"{visible!r}; correct it, make it empty to compute on the CPU, or see what nvidia-smi says"
            )
    # a UUID may be cut short
    found = [next((index for uuid, index in uuids.items() if uuid.startswith(name)), name) for name in names]
    return tuple(Gpu(name=name, memory_gib=memory_gib.get(index)) for name, index in zip(names, found, strict=True))


def require_platform(gpus: GpuPlacement, platform: Platform | None) -> None:
    """Raise `ConfigError` unless the installed vLLM computes where the server is placed; None: none is installed.

    Otherwise a server for CPUs would silently leave its GPUs idle.
    """
    if platform == "cpu" and gpus.server_gpus:
        raise ConfigError(
            f"server.gpus: expected vLLM for CUDA, because this machine has GPUs ({', '.join(gpus.server_gpus)}), got "
            "its build for CPUs; run set-up again (make setup), or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    if platform == "cuda" and not gpus.server_gpus:
        raise ConfigError(
            "server.gpus: expected a GPU for the installed vLLM, which computes with CUDA, got none; see whether "
            "nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"
        )


def copies_of(gpu_names: tuple[str, ...], tensor_parallel: int) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each copy of the server's model; a single copy without GPUs."""
    starts = range(0, len(gpu_names), tensor_parallel)
    return tuple(gpu_names[start : start + tensor_parallel] for start in starts) or ((),)


def plan_gpus(
    names: Sequence[str],
    server: ServerConfig,
    trainer: TrainerConfig,
    num_heads: int,
    *,
    has_server: bool = True,
    has_trainer: bool = True,
) -> GpuPlacement:
    """Split the GPUs called `names` between server and trainer; raises `ConfigError` for settings that cannot be met.

    One GPU is shared. Of several the server gets the first, the largest power of two that is at most half of them, and
    the trainer gets the others. If only one side is configured, the other side gets the remaining GPUs.
    Each GPU of the server holds a copy of the model, unless they are to hold it together.
    """
    for key, indices in (("server.gpus", server.gpus), ("trainer.gpus", trainer.gpus)):
        if indices is None:
            continue
        there = f"GPUs of 0 to {len(names) - 1}, each once" if names else "None, as no GPU is visible here"
        if not indices or len(set(indices)) < len(indices) or not all(0 <= index < len(names) for index in indices):
            raise ConfigError(
                f"{key}: expected {there}, got {list(indices)!r}; count GPUs from 0 among those of "
                "CUDA_VISIBLE_DEVICES, or leave it out"
            )
    serving, training = _split(len(names), server, trainer, has_server=has_server, has_trainer=has_trainer)
    if set(serving) & set(training) and set(serving) != set(training):
        raise ConfigError(
            f"server.gpus, trainer.gpus: expected GPUs of their own, or the same for both, got {serving!r} and "
            f"{training!r}; let them overlap completely or not at all"
        )
    num_processes = trainer.num_processes or max(1, len(training))
    if training and num_processes > len(training):
        raise ConfigError(
            f"trainer.num_processes: expected at most {len(training)}, one per GPU of the trainer, got "
            f"{num_processes}; lower it, or name more trainer.gpus"
        )
    training = training[:num_processes]
    wanted = server.tensor_parallel
    if wanted is not None and (len(serving) % wanted or num_heads % wanted or wanted > max(1, len(serving))):
        raise ConfigError(
            f"server.tensor_parallel: expected a number that divides the server's {len(serving)} GPUs and the model's "
            f"{num_heads} attention heads, got {wanted}; change it, or leave it out"
        )
    default = SHARED_UTILIZATION if set(serving) & set(training) else GPU_MEMORY_UTILIZATION
    return GpuPlacement(
        server_gpus=tuple(names[index] for index in serving),
        trainer_gpus=tuple(names[index] for index in training),
        num_trainer_processes=num_processes,
        tensor_parallel=wanted or 1,
        gpu_memory_utilization=server.gpu_memory_utilization or default,
    )


def _split(
    num_gpus: int, server: ServerConfig, trainer: TrainerConfig, *, has_server: bool, has_trainer: bool
) -> tuple[list[int], list[int]]:
    everything, serving, training = list(range(num_gpus)), server.gpus, trainer.gpus
    if not has_server:
        if serving is not None or server.tensor_parallel is not None:
            raise ConfigError(
                "server.gpus, server.tensor_parallel: expected None with base_url, whose server has been started "
                f"already, got {serving!r} and {server.tensor_parallel!r}; leave them out"
            )
        if not has_trainer:
            return [], []
        return [], everything if training is None else list(training)
    if not has_trainer:
        return everything if serving is None else list(serving), []
    if serving is None and training is None:
        # of several, the largest power of two that is at most half of them
        serving = tuple(everything[: 1 << ((num_gpus // 2).bit_length() - 1)] if num_gpus > 1 else everything)
    if serving is None:
        serving = _others(everything, training or ())
    if training is None:
        training = _others(everything, serving)
    return list(serving), list(training)


def _others(everything: Sequence[int], taken: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs that remain, or the same ones if none do."""
    return tuple(index for index in everything if index not in taken) or taken
