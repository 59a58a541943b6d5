"""Prints vLLM's engine configuration for options on eight H100s that are not there; run by test_gpu_arguments.py.

`python cuda_engine_config.py OPTIONS ...`, each a JSON list. Only the platform is a stand-in: it says what vLLM would
read from the driver. Parser, checks and defaults are those of the installed vLLM, with the code that it runs on CUDA.
"""
# ruff: noqa: E402 - the stand-in has to be there before vLLM

import json
import sys
from types import ModuleType

sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")  # which are not part of builds for CPUs

import vllm.model_executor.models.qwen3_vl_moe  # noqa: F401 - imports kernels unless the platform is a CPU
from vllm import platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser


class EightH100s(CudaPlatformBase):
    """What NVML says of them."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 * 2**30

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


def describe(options: list[str]) -> dict[str, object]:
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(options)
    args.model = args.model_tag  # as `vllm serve` does
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert config.lora_config is not None
    return {
        "architecture": config.model_config.architecture,
        "dtype": str(config.model_config.dtype),
        "head_dtype": str(config.model_config.head_dtype),
        "logprobs_mode": config.model_config.logprobs_mode,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "data_parallel": config.parallel_config.data_parallel_size,
        "worker": config.parallel_config.worker_cls,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "lora_rank": config.lora_config.max_lora_rank,
        "lora_modules": config.lora_config.target_modules,
        "max_model_len": config.model_config.max_model_len,
        "eager": config.model_config.enforce_eager,
    }


if __name__ == "__main__":
    platforms.current_platform.__class__ = EightH100s  # every module of vLLM holds this one object
    found = [describe(json.loads(options)) for options in sys.argv[1:]]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
