"""Facts for a bug report about a machine, and about the model server that started on it."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from cua_rl.host.masking import MASK, printable
from cua_rl.host.system import total_memory_bytes
from cua_rl.host.users import computing_environment
from cua_rl.machine.gpus import query_gpus, run_nvidia_smi
from cua_rl.machine.memory_parts import GIB
from cua_rl.types.errors import CuaError, boundary

ROOT = Path(__file__).parents[2]
_CLOCK_FIELDS = (
    "index,pstate,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,clocks_event_reasons.active,temperature.gpu,"
    "power.draw,power.limit,persistence_mode,pcie.link.gen.current,pcie.link.width.current"
)
"""What nvidia-smi says about speed; why clocks are low is a sum of NVML's `nvmlClocksEventReason...`, 1 if idle."""
_LIBRARIES = {
    "CUDA": r"nvidia-cuda-runtime(?:-cu\d+)?",
    "cuDNN": r"nvidia-cudnn-cu\d+",
    "NCCL": r"nvidia-nccl-cu\d+",
    "Triton": "triton",
    "FlashInfer": "flashinfer-python",
    "FlashAttention": r"flash-attn(?:-\d+)?",  # vLLM brings its own
    "flash-linear-attention": "flash-linear-attention",
    "causal-conv1d": "causal-conv1d",
    "Unsloth": "unsloth",
}
_STEERS_LIBRARIES = ("CUDA_", "NCCL_", "VLLM_", "PYTORCH_", "TORCH_", "TRITON_", "NVIDIA_")
_SERVER_LINES: Mapping[str, str] = {  # what vLLM logs as it starts
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "kv_cache_gib": r"(?:KV cache memory: |set \()([\d.]+)(?:/[\d.]+\))? GiB",  # computed, or given
    "attention": r"Using (?:AttentionBackendEnum\.)?([A-Z\d_]+)(?: attention backend out of| backend\.)",
    "flash_attention_version": r"Using FlashAttention version (\d+)",
    "vision_attention": r"Using (?:AttentionBackendEnum\.)?([A-Z\d_]+) for MMEncoderAttention",
    "model_runner": r"(?s)Initializing a (V1) LLM engine(?:.*Using (V2) Model Runner)?",  # the engine is always V1
}


def gather_facts(facts: Mapping[str, Callable[[], object]]) -> dict[str, object]:
    """The facts that could be found out; the others are None, with the reason under `missing`."""
    found: dict[str, object] = {}
    missing: dict[str, str] = {}
    for name, find in facts.items():
        found[name] = None
        try:
            with boundary(CuaError, name):
                found[name] = find()
        except CuaError as error:
            missing[name] = str(error)
    return found | {"missing": missing}


def machine_facts(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """What can be known without starting anything; `folder` is where the run writes."""
    places = {"log_dir": folder, "models": Path(HF_HUB_CACHE)}
    return gather_facts(
        {
            "platform": platform.platform,
            "num_cores": os.cpu_count,
            "memory_gib": lambda: round(total_memory_bytes() / GIB, 1),
            "cua_rl": partial(version, "cua_rl"),
            "commit": partial(find_commit, ROOT),
            "libraries": lambda: library_versions(installed_packages()),
            "variables": partial(library_variables, environ),
            "driver_cuda": lambda: _search(r"CUDA(?: UMD)? Version: *([\d.]+)", run_nvidia_smi(), "nvidia-smi"),
            "topology": lambda: parse_topology(run_nvidia_smi("topo", "-m")),
            "clocks": read_clocks,
            "shared_memory_gib": partial(space_gib, Path("/dev/shm")),
            "disk_gib": lambda: gather_facts({name: partial(space_gib, place) for name, place in places.items()}),
        }
    )


def read_server_log(text: str) -> dict[str, object]:
    """KV cache, attention and runner of a vLLM server, from its log since the latest start."""
    latest = printable(text).rpartition("non-default args: ")[2]

    def find(pattern: str) -> object:
        said = _search(pattern, latest, "the server's log").replace(",", "")
        return json.loads(said) if said[0].isdecimal() else said

    return gather_facts({name: partial(find, pattern) for name, pattern in _SERVER_LINES.items()})


def find_commit(root: Path) -> str:
    """The commit of the code in `root`, with `-dirty` if files have been changed since."""
    if not (root / ".git").exists():  # git would answer for a repository that merely holds the environment
        raise CuaError(f"expected a clone, got no .git in {root}")
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def installed_packages() -> dict[str, str]:
    """Versions by names as an index writes them: flash-attn calls itself flash_attn."""
    return {re.sub(r"[-_.]+", "-", found.name).lower(): found.version for found in distributions()}


def library_versions(installed: Mapping[str, str]) -> dict[str, object]:
    """Versions of what computes on GPUs, as far as packages bring it."""
    lines = "\n".join(f"{name}=={version}" for name, version in installed.items())
    find = partial(_search, text=lines, where="the installed packages")
    return gather_facts({name: partial(find, rf"(?m)^{package}==(.+)$") for name, package in _LIBRARIES.items()})


def library_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of GPU libraries, as model server and trainer get them; *** for those that they do not get."""
    given = computing_environment(environ)
    names = sorted(name for name in environ.keys() | given.keys() if name.startswith(_STEERS_LIBRARIES))
    return {name: given.get(name, MASK) for name in names}


def parse_topology(printed: str) -> dict[str, dict[str, str]]:
    """The table of `nvidia-smi topo -m`: how each GPU reaches the others, network cards and processors."""
    head, *rows = [line.split("\t") for line in printable(printed).splitlines() if "\t" in line] or [[printed]]
    if not rows:
        raise CuaError(f"expected a table with tabs, got {printed!r}")
    return {
        row[0]: {column: cell.strip() for column, cell in zip(head[1:], row[1:], strict=False) if cell.strip()}
        for row in rows
    }


def read_clocks() -> list[dict[str, str]]:
    """Clocks, power and temperature of every GPU now, as nvidia-smi words them."""
    rows = ([cell.strip() for cell in line.split(",")] for line in query_gpus(_CLOCK_FIELDS).splitlines())
    return [dict(zip(_CLOCK_FIELDS.split(","), row, strict=True)) for row in rows]


def space_gib(path: Path) -> dict[str, object]:
    """Room in the file system that has `path`, or will have it."""
    usage = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists()))
    return {"path": str(path), "total": round(usage.total / GIB, 1), "free": round(usage.free / GIB, 1)}


def _search(pattern: str, text: str, where: str) -> str:
    """The last group that the pattern finds."""
    found = re.search(pattern, text)
    if found is None:
        raise CuaError(f"expected {pattern} in {where}, got none")
    return found[found.lastindex or 0]
