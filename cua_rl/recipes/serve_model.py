"""Serve a model to runs on other hosts: `python -m cua_rl.recipes.serve_model model_name=... host=10.0.0.5 port=8000`.

The server has what training needs (docs/models.md), takes adapters over HTTP, so that no folder has to be shared, and
is started again if it dies. Its key is `VLLM_API_KEY`, which the runs that use it need too (`base_url=...`).
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.recipe import run_recipe
from cua_rl.config import ServerConfig
from cua_rl.errors import ConfigError, boundary
from cua_rl.host.processes import free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.run.preflight import require_vllm_args
from cua_rl.run_folder.model_folder import fetch_weights, find_max_model_len, find_model, start_limit_s
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.server import VllmServer
from cua_rl.settings import check_numbers, setting

_SHORTEST_KEY = 16


@chz.chz
class ServeModelConfig:
    """Serve a model to runs on other hosts."""

    model_name: str | None = setting(None, "folder or hub id of the model; None uses the included tiny model")
    host: str = setting("127.0.0.1", "address of this host to listen on; choose that of the network of the runs")
    port: int = setting(8000, "port to listen on", within=(0, 65535))
    max_lora_rank: int = setting(32, "at least the lora_rank of the runs; vLLM has 8, 16, 32, 64, 128, 256, 320, 512")
    max_model_len: int | None = setting(None, "context length, tokens, at least that of the runs; None is the default")
    max_images: int = setting(32, "maximum images per prompt", at_least=1)
    max_pixels: int | None = setting(
        None, "maximum pixels of a screenshot as the model sees it, server.max_pixels of the runs; None is the model's"
    )
    max_num_seqs: int = setting(128, "maximum batch size, requests", at_least=1)
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "precision; auto is the checkpoint's")
    gpus: tuple[str, ...] = setting((), "GPUs, as in CUDA_VISIBLE_DEVICES; () are all visible ones")
    tensor_parallel: int = setting(1, "GPUs that hold the model together", at_least=1)
    gpu_memory_utilization: float = setting(0.85, "fraction of GPU memory for vLLM", within=(0.0, 1.0))
    vllm_args: str = setting("", "more options of vLLM's server, as on a command line")
    start_timeout_s: float | None = setting(
        None, "limit for the start; None is 600 s and a second per 50 MB of weights", within=(1.0, 86400.0)
    )
    log_path: str = setting("vllm.log", "file for the server's output")

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


async def cli_main(config: ServeModelConfig, environ: Mapping[str, str] = os.environ) -> None:
    require_key(environ.get(API_KEY_VARIABLE))
    log_path = await asyncio.to_thread(Path(config.log_path).absolute)
    with boundary(
        ConfigError, f"host, port: expected a free port, got {config.port} of {config.host!r}; choose another"
    ):
        free_port(config.port, config.host)
    await require_vllm_args(config.vllm_args, "vllm_args")
    with boundary(ConfigError, f"log_path: expected a file to write, got {str(log_path)!r}; choose another"):
        await asyncio.to_thread(log_path.parent.mkdir, parents=True, exist_ok=True)
        (await asyncio.to_thread(log_path.open, "ab")).close()
    model_path = await asyncio.to_thread(find_model, config.model_name)
    await asyncio.to_thread(fetch_weights, config.model_name, model_path)
    served = ServerConfig(
        model_path=model_path,
        max_lora_rank=config.max_lora_rank,
        max_model_len=find_max_model_len(model_path, config.max_model_len, max_tokens=1),
        max_num_seqs=config.max_num_seqs,
        max_images=config.max_images,
        max_pixels=config.max_pixels,
        gpu_memory_utilization=config.gpu_memory_utilization,
        gpus=config.gpus,
        tensor_parallel=config.tensor_parallel,
        dtype=config.dtype,
        vllm_args=tuple(shlex.split(config.vllm_args)),
        host=config.host,
        port=config.port,
        adapter_folder=await asyncio.to_thread(make_scratch_folder, "adapters"),
        start_timeout_s=config.start_timeout_s or start_limit_s(model_path),
    )
    async with VllmServer(served, log_path) as server:
        print(f"model server: {server.base_url}, which asks for {API_KEY_VARIABLE}; nothing is encrypted", flush=True)
        while True:  # it is started again if it dies
            await server.wait_until_ready()
            await asyncio.sleep(1)


def require_key(key: str | None) -> None:
    """Raise `ConfigError` for a missing key, or one that is easy to guess."""
    if key is None or len(key) < _SHORTEST_KEY:
        raise ConfigError(
            f"{API_KEY_VARIABLE}: expected the key of the server, at least {_SHORTEST_KEY} characters, got "
            f"{'none' if not key else len(key)}; set it to a long random text, here and where the runs are"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    return run_recipe(ServeModelConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
