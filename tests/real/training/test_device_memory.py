"""What the trainer does with the memory of a GPU; the calls of CUDA are stand-ins, as no GPU is here."""

import pytest
import torch

from cua_rl.training.device_memory import limit_memory, release_memory, shortage
from cua_rl.training.endpoints import rank_environment


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: cudaErrorMemoryAllocation"),
        RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_whoever_finds_no_memory_it_is_a_shortage(error: RuntimeError) -> None:
    assert shortage(error) == str(error)


def test_another_error_is_none() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        shortage(error)


def test_a_gpu_is_limited_and_its_cache_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty_cache"))

    limit_memory(0.25)
    release_memory()
    assert told == []  # on a CPU

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limit_memory(0.25)
    release_memory()
    assert told == [0.25, "empty_cache"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_the_allocator_grow_unless_it_is_set_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(one, raising=False)
    assert rank_environment(1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    monkeypatch.setenv(name, "max_split_size_mb:512")
    environment = rank_environment(1)
    assert environment[name] == "max_split_size_mb:512"
    assert "expandable_segments:True" not in environment.values()
