"""How a vLLM server is started for training: command line, environment, and what is different without a GPU."""

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from cua_rl.config import ServerConfig
from cua_rl.errors import ConfigError

BASE_MODEL_NAME = "base"
"""Under this name the server knows the model without an adapter."""

_CPU_WORKER = "cua_rl.vllm_cpu_worker.GroupedLoraCPUWorker"


def vllm_command(config: ServerConfig, port: int) -> list[str]:
    """The command that serves `config.model_path` on a loopback port.

    The server has no tool or reasoning parser: answers come back raw, with a log-probability for each token. These are
    taken after temperature, as the trainer takes them.

    Raises:
        ConfigError: vLLM is not installed.
    """
    settings: dict[str, object] = {
        "model": config.model_path,
        "served-model-name": BASE_MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        "max-lora-rank": config.max_lora_rank,
        "max-loras": config.max_adapters,
        "max-cpu-loras": config.max_adapters,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "limit-mm-per-prompt": json.dumps({"image": config.max_images, "video": 0}),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "uvicorn-log-level": "warning",
    }
    flags = ["--enable-lora", "--enable-prefix-caching"]
    if runs_on_cpu():
        settings |= _cpu_settings(config)
        flags.append("--enforce-eager")
    else:
        settings |= {"dtype": config.dtype, "gpu-memory-utilization": config.gpu_memory_utilization}
        settings |= {"tensor-parallel-size": config.tensor_parallel, "data-parallel-size": config.data_parallel}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *flags]


def vllm_environment(config: ServerConfig) -> dict[str, str]:
    """The server's environment: ours, adapters may change at run time, nothing is looked up on the network."""
    environment = dict(os.environ)
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.model_path.is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus)
    if runs_on_cpu():
        environment |= _cpu_environment(environment)
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would overrule kv_cache_gib
    return environment


def runs_on_cpu() -> bool:
    """Whether the vLLM that is installed computes on the CPU.

    Raises:
        ConfigError: none is installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "expected vLLM beside this package, got no module named 'vllm'; install the extra 'gpu' or 'cpu', "
            "or point base_url to a server that runs"
        )
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cpu" in version("vllm")
    return True


def _cpu_settings(config: ServerConfig) -> dict[str, object]:
    """float32 unless told otherwise: without matrix units for bfloat16, a CPU computes it far more slowly."""
    return {
        "dtype": "float32" if config.dtype == "auto" else config.dtype,
        "kv-cache-memory-bytes": int(config.kv_cache_gib * 2**30),
        "worker-cls": _CPU_WORKER,
        "distributed-executor-backend": "uni",
    }


def _cpu_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """One process computes: a worker of its own would only make two of them wait for each other, spinning.

    vLLM allows that only with its multiprocessing switch off (its engine is a process of its own all the same). Nothing
    is compiled: for one small function vLLM would have the first request of a fresh machine wait 20 s for a C++
    compiler, and PyTorch writes wrong code for it where the processor has no AVX2.
    """
    num_threads = max(1, (os.cpu_count() or 1) // 2)
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": ours.get("OMP_NUM_THREADS", str(num_threads)),
    }
