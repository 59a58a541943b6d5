"""What the doctor says of a machine: real programs and files, with a stand-in for nvidia-smi in PATH."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cua_rl.doctor.facts import (
    find_commit,
    installed_packages,
    library_versions,
    machine_facts,
    parse_topology,
    read_server_log,
)
from cua_rl.reporting.diagnosis import Diagnosis, Finding

ROOT = Path(__file__).parents[2]
# as drivers of 2023 and later print it: underlined columns, tabs, and an empty column before the last
TOPOLOGY = (
    "\t\033[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n"
    "GPU0\t X \tNV12\tPXB\t0-15,64-79\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\t16-31,80-95\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = some NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
CLOCKS = (
    "0, P0, 1755, 1980, 2619, 2619, 0x0000000000000004, 61, 651.20, 700.00, Enabled, 5, 16\n"
    "1, P0, 345, 1980, 2619, 2619, 0x0000000000000001, 31, [N/A], [N/A], Enabled, 5, 16\n"
)
BANNER = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs: git."""
    folder = tmp_path / "bin"
    folder.mkdir()
    git = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_smi(folder: Path, banner: str = BANNER, topology: str = TOPOLOGY, clocks: str = CLOCKS) -> None:
    for name, text in {"banner": banner, "topo": topology, "clocks": clocks}.items():
        (folder / f"{name}.txt").write_text(text)
    program = folder / "nvidia-smi"
    cases = f"topo) f=topo;; --query-gpu=*clocks.sm*) f=clocks;; *) f=banner;; esac; cd {folder}"
    program.write_text(f'#!/bin/sh\ncase "$1" in {cases}; while IFS= read -r line; do echo "$line"; done < $f.txt\n')
    program.chmod(0o755)


def test_topology_clocks_and_cuda_are_what_nvidia_smi_says(programs: Path, tmp_path: Path) -> None:
    write_smi(programs)

    facts: Any = machine_facts(tmp_path)

    assert facts["missing"] == {}
    assert facts["driver_cuda"] == "13.0"
    assert facts["topology"]["GPU0"] == {
        "GPU0": "X", "GPU1": "NV12", "NIC0": "PXB", "CPU Affinity": "0-15,64-79", "NUMA Affinity": "0",
    }  # fmt: skip
    assert facts["topology"]["NIC0"] == {"GPU0": "PXB", "GPU1": "SYS", "NIC0": "X"}
    assert (facts["clocks"][0]["clocks.sm"], facts["clocks"][0]["clocks.max.sm"]) == ("1755", "1980")
    assert facts["clocks"][0]["clocks_event_reasons.active"] == "0x0000000000000004"  # the limit of power
    assert facts["clocks"][1]["power.draw"] == "[N/A]"


def test_newer_drivers_name_the_version_of_cuda_otherwise(programs: Path, tmp_path: Path) -> None:
    write_smi(programs, "| NVIDIA-SMI 610.57.04   KMD Version: 610.57.04   CUDA UMD Version: 13.3     |\n")

    assert machine_facts(tmp_path)["driver_cuda"] == "13.3"


def test_what_cannot_be_had_is_none_with_a_reason(programs: Path, tmp_path: Path) -> None:
    facts: Any = machine_facts(tmp_path / "not" / "yet")

    assert facts["topology"] is facts["clocks"] is facts["driver_cuda"] is None
    assert all("expected nvidia-smi" in facts["missing"][name] for name in ("topology", "clocks", "driver_cuda"))
    assert facts["disk_gib"]["log_dir"]["free"] > 0
    assert {"platform", "num_cores", "memory_gib", "commit", "libraries", "variables", "disk_gib"} <= facts.keys()
    json.dumps(facts)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "version mismatch"),
        ("echo '0, P0'", "ValueError"),
        ("exit 0", "expected"),
    ],
)
def test_a_driver_that_does_not_answer_stops_nothing(programs: Path, tmp_path: Path, said: str, reason: str) -> None:
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{said}\n")
    (programs / "nvidia-smi").chmod(0o755)

    facts: Any = machine_facts(tmp_path)

    assert facts["topology"] is None
    assert reason in str(facts["missing"])
    assert facts["platform"]


def test_a_gpu_alone_has_a_table_too() -> None:
    printed = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\tN/A\n"

    assert parse_topology(printed) == {"GPU0": {"GPU0": "X"}}


def test_no_secret_among_the_variables_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "VLLM_API_KEY": "canary-of-a-key",
        "VLLM_OF_ANOTHER_PROGRAM": "canary-of-another-program",
        "NCCL_DEBUG_FILE": "/tmp/canary-known-by-another-name",
        "HF_TOKEN": "canary-known-by-another-name",
        "LEAVE_ME": "canary-of-no-library",
    }
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    diagnosis = Diagnosis(tmp_path)
    diagnosis.findings["machine"] = Finding(verdict="ok", got="", figures=machine_facts(tmp_path))

    diagnosis.write(tmp_path / "doctor.json", {})

    written = (tmp_path / "doctor.json").read_text()
    variables = json.loads(written)["findings"][0]["figures"]["variables"]
    assert "canary" not in written
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["NCCL_DEBUG"]) == ("0,1", "INFO")
    assert variables["VLLM_API_KEY"] == variables["VLLM_OF_ANOTHER_PROGRAM"] == "***"
    assert "LEAVE_ME" not in variables


def test_the_libraries_of_a_gpu_machine_are_found_by_the_names_of_their_packages() -> None:
    lines = (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    installed = dict(line.split(" ")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))

    found: Any = library_versions(installed)

    assert found["NCCL"] == installed["nvidia-nccl-cu13"]
    assert found["Triton"] == installed["triton"]
    assert None not in [found[name] for name in ("CUDA", "cuDNN", "FlashInfer", "flash-linear-attention")]
    assert library_versions({"nvidia-cuda-runtime-cu12": "12.9.79"})["CUDA"] == "12.9.79"


def test_packages_are_found_however_they_write_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("flash_attn-2.8.3", "flash_attn"), ("causal_conv1d-1.6", "Causal.Conv1d")):
        (tmp_path / f"{folder}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {folder.partition('-')[2]}\n"
        (tmp_path / f"{folder}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    found = library_versions(installed_packages())

    assert (found["FlashAttention"], found["causal-conv1d"]) == ("2.8.3", "1.6")


def test_the_commit_is_that_of_the_code_and_of_no_repository_around_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "code.py").write_text("1\n")
    for arguments in (("init",), ("add", "."), ("commit", "-m", "first"), ("tag", "-a", "v1", "-m", "v1")):
        git(*arguments)
    commit = git("rev-parse", "HEAD")
    assert find_commit(tmp_path) == commit

    (tmp_path / "code.py").write_text("2\n")
    assert find_commit(tmp_path) == f"{commit}-dirty"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    with pytest.raises(Exception, match="expected a clone"):
        find_commit(installed)


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM, whose log this is")
# file of vLLM, the beginning of what it logs there, and the values that it gives, on a GPU
ON_A_GPU = (
    ("v1/engine/core.py", "Initializing a V1 LLM engine (v%s) with config: %s", ("0.32.0", "model='m'")),
    ("v1/worker/gpu_worker.py", "Using V2 Model Runner", ()),
    ("v1/worker/gpu_worker.py", "Available KV cache memory: %s GiB", ("41.27",)),
    ("v1/core/kv_cache_utils.py", "%s KV cache size: %s tokens, ", ("GPU", "1,202,160")),
    ("v1/attention/backends/flash_attn.py", "Using FlashAttention version %s", (3,)),
    (
        "platforms/cuda.py",
        "Using %s attention backend out of potential backends: %s.",
        ("FLASH_ATTN", "['FLASH_ATTN']"),
    ),
)
VISION = (
    "model_executor/layers/attention/mm_encoder_attention.py",
    "Using {self.attn_backend} for MMEncoderAttention.",
)


def gpu_log(*left_out: str) -> str:
    """A log by the format strings of the installed vLLM, as one of its processes writes it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package, lines = Path(spec.origin).parent, ["INFO 11-25 [api_utils.py:286] non-default args: {}"]
    for file, said, values in (*ON_A_GPU, (*VISION, ())):
        assert f'"{said}' in (package / file).read_text(), f"{file} says it otherwise"
        told = said.replace("{self.attn_backend}", "AttentionBackendEnum.FLASH_ATTN")
        lines.append(f"(EngineCore pid=17) INFO 11-25 20:54:10 [a.py:1] {told % values}")
    return "\n".join(line for line in lines if not any(part in line for part in left_out))


@needs_vllm
def test_what_vllm_logs_on_a_gpu_is_understood() -> None:
    assert read_server_log(gpu_log()) == {
        "kv_cache_tokens": 1202160,
        "kv_cache_gib": 41.27,
        "attention": "FLASH_ATTN",
        "flash_attention_version": 3,
        "vision_attention": "FLASH_ATTN",
        "model_runner": "V2",
        "missing": {},
    }
    assert read_server_log(gpu_log("V2 Model Runner"))["model_runner"] == "V1"


@needs_vllm
def test_a_backend_that_was_asked_for_is_logged_otherwise_and_an_earlier_start_does_not_count() -> None:
    chosen = gpu_log("out of potential") + "\nINFO [cuda.py:446] Using AttentionBackendEnum.FLASHINFER backend."
    earlier = (
        "INFO non-default args: {}\nINFO GPU KV cache size: 5 tokens\nINFO Using FLEX attention backend out of it\n"
    )

    assert read_server_log(earlier + chosen)["attention"] == "FLASHINFER"
    assert read_server_log(earlier + chosen)["kv_cache_tokens"] == 1202160
    nothing: Any = read_server_log("INFO non-default args: {}\n")
    assert nothing["kv_cache_tokens"] is nothing["model_runner"] is None
    assert "KV cache size" in nothing["missing"]["kv_cache_tokens"]
