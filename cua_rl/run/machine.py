"""The machine that a run is planned for: its GPUs and its memory."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from cua_rl import system
from cua_rl.errors import ConfigError
from cua_rl.run.gpus import visible_gpus

_MOST_GPUS = 64
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to plan with."""

    gpus: tuple[str, ...]
    """Names, as in CUDA_VISIBLE_DEVICES."""
    gpu_gib: float | None
    """Memory of the smallest one; None if the driver does not say."""
    host_gib: float | None
    """Main memory; None if it is not known."""


def find_machine(described: str | None, environ: Mapping[str, str], *, is_dry_run: bool) -> Machine:
    """This machine, or in a dry run the one that `described` stands for: `4x80`, four GPUs of 80 GiB each."""
    if described is None:
        gpus = visible_gpus(environ)
        return Machine(gpus=gpus, gpu_gib=_gpu_gib() if gpus else None, host_gib=system.total_memory_bytes() / 2**30)
    if not is_dry_run:
        raise ConfigError(
            f"machine: expected it only with dry_run=true, which plans for another machine, got {described!r} in a "
            "run; leave it out"
        )
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", described)
    if found is None or not 1 <= int(found[1]) <= _MOST_GPUS:
        raise ConfigError(
            f"machine: expected the number of GPUs and the GiB of each, such as 4x80, got {described!r}; correct it, "
            "or leave it out"
        )
    return Machine(gpus=tuple(map(str, range(int(found[1])))), gpu_gib=float(found[2]), host_gib=None)


def _gpu_gib() -> float | None:
    """Memory of the smallest GPU, from NVIDIA's own program, which comes with the driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER_S).stdout
        return min(float(line) for line in printed.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
