"""Who uses which GPU."""

from pathlib import Path

import pytest

from cua_rl.errors import ConfigError
from cua_rl.run.gpus import GpuPlan, GpuWishes, plan_gpus, visible_gpus


def plan(num_gpus: int, wishes: GpuWishes | None = None, num_heads: int = 32) -> GpuPlan:
    return plan_gpus([f"gpu{index}" for index in range(num_gpus)], wishes or GpuWishes(), num_heads)


def split(found: GpuPlan) -> tuple[str, str]:
    return "".join(name[-1] for name in found.server_gpus), "".join(name[-1] for name in found.trainer_gpus)


def test_without_a_gpu_processes_are_counted_only() -> None:
    assert (plan(0).num_trainer_processes, plan(0).server_gpus, plan(0).is_shared) == (1, (), False)
    assert plan(0, GpuWishes(trainer_num_processes=2)).num_trainer_processes == 2


def test_one_gpu_is_shared_and_has_room_for_both() -> None:
    assert (split(plan(1)), plan(1).is_shared) == (("0", "0"), True)
    assert plan(1).gpu_memory_utilization < 0.5 < plan(2).gpu_memory_utilization
    assert plan(1, GpuWishes(gpu_memory_utilization=0.3)).gpu_memory_utilization == 0.3


def test_the_server_gets_the_largest_power_of_two_up_to_half() -> None:
    splits = [split(plan(num_gpus)) for num_gpus in (2, 3, 4, 6, 8)]

    assert splits == [("0", "1"), ("0", "12"), ("01", "23"), ("01", "2345"), ("0123", "4567")]
    assert plan(8).tensor_parallel == plan(8).num_trainer_processes == 4


def test_who_is_named_gpus_leaves_the_others_to_the_other_side() -> None:
    assert split(plan(4, GpuWishes(server_gpus=[3]))) == ("3", "012")
    assert split(plan(4, GpuWishes(trainer_gpus=[0]))) == ("123", "0")
    assert split(plan(2, GpuWishes(server_gpus=[0, 1]))) == ("01", "01")
    assert split(plan(4, GpuWishes(has_server=False))) == ("", "0123")
    assert split(plan(4, GpuWishes(has_trainer=False))) == ("0123", "")
    assert split(plan(4, GpuWishes(trainer_num_processes=1))) == ("01", "2")


def test_gpus_of_the_server_are_tensor_parallel_as_far_as_heads_can_be_split() -> None:
    three = plan(4, GpuWishes(trainer_gpus=[0]))
    four = plan(8, GpuWishes(server_tensor_parallel=2))

    assert (three.tensor_parallel, three.data_parallel) == (1, 3)
    assert (four.tensor_parallel, four.data_parallel) == (2, 2)


@pytest.mark.parametrize(
    ("num_gpus", "wishes", "message"),
    [
        (2, GpuWishes(server_gpus=[2]), r"server\.gpus: expected GPUs of 0 to 1, each once, got \[2\]"),
        (2, GpuWishes(trainer_gpus=[1, 1]), r"trainer\.gpus: expected GPUs of 0 to 1, each once, got \[1, 1\]"),
        (0, GpuWishes(server_gpus=[0]), r"server\.gpus: expected None, as no GPU is visible here"),
        (4, GpuWishes(server_gpus=[0, 1], trainer_gpus=[1, 2]), "let them overlap wholly or not at all"),
        (4, GpuWishes(trainer_num_processes=3), r"trainer\.num_processes: expected at most 2"),
        (4, GpuWishes(server_tensor_parallel=4), r"server\.tensor_parallel: expected a number that divides"),
        (2, GpuWishes(server_gpus=[0], has_server=False), "expected None with base_url"),
    ],
)
def test_what_cannot_be_is_refused(num_gpus: int, wishes: GpuWishes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(num_gpus, wishes)


def test_gpus_are_named_as_a_process_sees_them(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()

    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-8932"}, tmp_path) == ("3", "GPU-8932")
    assert [visible_gpus({"CUDA_VISIBLE_DEVICES": none}, tmp_path) for none in ("", "-1")] == [(), ()]
    assert visible_gpus({}, tmp_path / "none") == ()
