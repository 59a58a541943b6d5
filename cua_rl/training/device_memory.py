# pyright: reportUnknownMemberType=false
"""The memory of the trainer's GPU, which a model server may share."""

import torch

from cua_rl.host.system import free_memory_frac, total_memory_bytes

_SHORTAGES = (
    "out of memory",  # the allocator, CUDA ("CUDA error: out of memory") and NCCL ("Cuda failure 2 'out of memory'")
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What PyTorch's errors say when a library, not its own allocator, finds no memory."""


def limit_memory(fraction: float) -> None:
    """Let this process allocate at most `fraction` of its GPU: before it takes more, PyTorch releases cached blocks."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)


def free_memory_bytes(device: torch.device) -> int:
    """What this process can still allocate: of its GPU, or of main memory."""
    if device.type != "cuda":
        return int(free_memory_frac() * total_memory_bytes())
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_allocated(device)
    return int(min(free + cached, allowed))


def release_memory() -> None:
    """Return cached blocks to the GPU, where a model server that starts again needs them."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shortage(error: RuntimeError) -> str:
    """The message about missing memory; raises any other error again."""
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _SHORTAGES):
        return str(error)
    raise error
