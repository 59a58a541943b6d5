"""Who uses which GPU."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cua_rl.machine.gpus import (
    GpuPlacement,
    ask_nvidia_smi,
    plan_gpus,
    require_platform,
    visible_gpus,
)
from cua_rl.run_folder.model_folder import start_limit_s
from cua_rl.sampling.config import ServerConfig
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError

SERVER, TRAINER = ServerConfig(), TrainerConfig()


def plan(num_gpus: int, server: ServerConfig = SERVER, trainer: TrainerConfig = TRAINER, **has: bool) -> GpuPlacement:
    return plan_gpus([f"gpu{index}" for index in range(num_gpus)], server, trainer, num_heads=32, **has)


def split(found: GpuPlacement) -> tuple[str, str]:
    return "".join(name[-1] for name in found.server_gpus), "".join(name[-1] for name in found.trainer_gpus)


def test_without_a_gpu_processes_are_counted_only() -> None:
    assert (plan(0).num_trainer_processes, plan(0).server_gpus, plan(0).is_shared) == (1, (), False)
    assert plan(0, trainer=TrainerConfig(num_processes=2)).num_trainer_processes == 2


def test_one_gpu_is_shared_and_has_room_for_both() -> None:
    assert (split(plan(1)), plan(1).is_shared) == (("0", "0"), True)
    assert plan(1).gpu_memory_utilization < 0.5 < plan(2).gpu_memory_utilization
    assert plan(1, server=ServerConfig(gpu_memory_utilization=0.3)).gpu_memory_utilization == 0.3


def test_the_server_gets_the_largest_power_of_two_up_to_half() -> None:
    splits = [split(plan(num_gpus)) for num_gpus in (2, 3, 4, 6, 8)]

    assert splits == [("0", "1"), ("0", "12"), ("01", "23"), ("01", "2345"), ("0123", "4567")]
    assert plan(8).num_trainer_processes == 4


def test_who_is_named_gpus_leaves_the_others_to_the_other_side() -> None:
    assert split(plan(4, server=ServerConfig(gpus=(3,)))) == ("3", "012")
    assert split(plan(4, trainer=TrainerConfig(gpus=(0,)))) == ("123", "0")
    assert split(plan(2, server=ServerConfig(gpus=(0, 1)))) == ("01", "01")
    assert split(plan(4, has_server=False)) == ("", "0123")
    assert split(plan(4, has_trainer=False)) == ("0123", "")
    assert split(plan(4, trainer=TrainerConfig(num_processes=1))) == ("01", "2")


def test_every_gpu_of_the_server_holds_a_copy_of_the_model_unless_they_hold_it_together() -> None:
    assert plan(8).server_copies == (("gpu0",), ("gpu1",), ("gpu2",), ("gpu3",))
    assert plan(8, server=ServerConfig(tensor_parallel=2)).server_copies == (("gpu0", "gpu1"), ("gpu2", "gpu3"))
    assert plan(8, server=ServerConfig(tensor_parallel=4)).server_copies == (("gpu0", "gpu1", "gpu2", "gpu3"),)
    assert plan(0).server_copies == ((),)  # on the CPU


@pytest.mark.parametrize(
    ("num_gpus", "settings", "message"),
    [
        (2, {"server": ServerConfig(gpus=(2,))}, r"server\.gpus: expected GPUs of 0 to 1, each once, got \[2\]"),
        (
            2,
            {"trainer": TrainerConfig(gpus=(1, 1))},
            r"trainer\.gpus: expected GPUs of 0 to 1, each once, got",
        ),
        (0, {"server": ServerConfig(gpus=(0,))}, r"server\.gpus: expected None, as no GPU is visible here"),
        (
            4,
            {"server": ServerConfig(gpus=(0, 1)), "trainer": TrainerConfig(gpus=(1, 2))},
            "let them overlap completely or not at all",
        ),
        (4, {"trainer": TrainerConfig(num_processes=3)}, r"trainer\.num_processes: expected at most 2"),
        (4, {"server": ServerConfig(tensor_parallel=4)}, r"server\.tensor_parallel: expected a number that divides"),
        (2, {"server": ServerConfig(gpus=(0,)), "has_server": False}, "expected None with base_url"),
    ],
)
def test_what_cannot_be_is_refused(num_gpus: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(num_gpus, **settings)


TWO_GPUS = "0, GPU-8932-a, 81559\n1, GPU-4711-b, [N/A]\n"


def names(environ: dict[str, str], smi: str = TWO_GPUS) -> list[tuple[str, float | None]]:
    return [(gpu.name, gpu.memory_gib) for gpu in visible_gpus(environ, lambda: smi)]


def test_gpus_are_named_as_a_process_sees_them() -> None:
    assert names({}) == [("0", 81559 / 1024), ("1", None)]
    assert names({"CUDA_VISIBLE_DEVICES": "1, GPU-8932"}) == [("1", None), ("GPU-8932", 81559 / 1024)]
    assert names({"CUDA_VISIBLE_DEVICES": "MIG-1-2-3"}) == [("MIG-1-2-3", None)]
    assert [names({"CUDA_VISIBLE_DEVICES": none}) for none in ("", "-1")] == [[], []]
    assert names({}, "") == []


@pytest.mark.parametrize(("visible", "smi"), [("2", TWO_GPUS), ("0", ""), ("GPU-8932", "")])
def test_a_named_gpu_that_is_not_here_is_refused(visible: str, smi: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: expected GPUs of this machine \((0, 1|none)\), got"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, lambda: smi)


def test_gpus_are_counted_by_the_driver_of_the_container(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    asked = f'case "$1" in *index,uuid,memory.total) printf "{TWO_GPUS[:-1]}\\n";; esac'
    program.write_text(f"#!{shutil.which('sh')}\n{asked}\n")
    program.chmod(0o755)
    assert ask_nvidia_smi(search_path=str(tmp_path)) == TWO_GPUS

    program.write_text(f"#!{shutil.which('sh')}\necho NVIDIA-SMI has failed; exit 9\n")
    assert ask_nvidia_smi(search_path=str(tmp_path)) == ""
    assert ask_nvidia_smi(search_path=os.devnull) == ""


def test_a_server_that_would_leave_its_gpus_idle_is_refused() -> None:
    require_platform(plan(1), "cuda")
    require_platform(plan(0), "cpu")
    with pytest.raises(
        ConfigError, match=r"server\.gpus: expected vLLM for CUDA, because this machine has GPUs \(gpu0\)"
    ):
        require_platform(plan(1), "cpu")
    with pytest.raises(ConfigError, match=r"expected a GPU for the installed vLLM, which computes with CUDA, got none"):
        require_platform(plan(0), "cuda")


def test_a_server_has_longer_to_start_where_its_weights_take_longer_to_read(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**9)  # takes no room on the disk

    # 600 s, and 2 GB at 50 MB/s
    assert start_limit_s(tmp_path) == 640.0
