"""The machine for which a run is configured: its GPUs and its memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cua_rl.host import system
from cua_rl.machine.gpus import visible_gpus
from cua_rl.types.errors import ConfigError

_MOST_GPUS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs and the memory of a machine."""

    gpus: tuple[str, ...]
    """Names, as in CUDA_VISIBLE_DEVICES."""
    gpu_gib: float | None
    """Memory of the smallest one; None if the driver does not report it."""
    host_gib: float | None
    """Main memory; None if it is not known."""


def find_machine(described: str | None, environ: Mapping[str, str], *, is_dry_run: bool) -> Machine:
    """This machine or, in a dry run, a described one: `4x80` stands for four GPUs of 80 GiB each."""
    if described is None:
        gpus = visible_gpus(environ)
        sizes = [gpu.memory_gib for gpu in gpus if gpu.memory_gib is not None]
        return Machine(
            gpus=tuple(gpu.name for gpu in gpus),
            gpu_gib=min(sizes) if sizes and len(sizes) == len(gpus) else None,
            host_gib=system.total_memory_bytes() / 2**30,
        )
    if not is_dry_run:
        raise ConfigError(
            f"machine: expected it only with dry_run=true, which may be for another machine, got {described!r} in a "
            "run; leave it out"
        )
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", described)
    if found is None or not 1 <= int(found[1]) <= _MOST_GPUS:
        raise ConfigError(
            f"machine: expected the number of GPUs and the GiB of each, such as 4x80, got {described!r}; correct it, "
            "or leave it out"
        )
    return Machine(gpus=tuple(map(str, range(int(found[1])))), gpu_gib=float(found[2]), host_gib=None)
