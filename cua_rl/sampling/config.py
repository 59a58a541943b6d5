"""The model server's configuration, one class for people, the run and the server.

The run fills in what is `by_run`, and chooses what is None; a server that is started by itself has its own defaults.
"""

from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.fields import AT_MOST_A_DAY, setting
from cua_rl.types.errors import ConfigError

DEFAULT_NUM_SEQS, DEFAULT_IMAGES = 128, 32
_CONTEXT_TOKENS = 4096
GPU_MEMORY_UTILIZATION = 0.85
START_TIMEOUT_S = 300.0
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank


@chz.chz
class ServerConfig:
    """The vLLM server that a run starts, and the context of the model."""

    port: int | None = setting(
        None, "loopback port of the server (copies use the next ones); None uses a Unix socket", within=(0, 65535)
    )
    max_model_len: int | None = setting(
        None, "maximum tokens of prompt and response together; None is the model's limit, at most 16384", at_least=64
    )
    max_num_seqs: int | None = setting(
        None, "maximum batch size, requests; None is 128, or the half-full contexts that the KV cache holds", at_least=1
    )
    max_images: int | None = setting(
        None, "maximum screenshots per prompt; None computes it from history and turns", at_least=1
    )
    max_pixels: int | None = setting(
        None,
        "maximum pixels of a screenshot as the model sees it; larger ones are scaled down, and a token is 32 x 32 "
        "pixels; None is the model's limit",
        at_least=4096,
    )
    gpus: tuple[int, ...] | None = setting(
        None, "GPUs, such as 0,1; None uses about half of several GPUs, in an evaluation all of them"
    )
    tensor_parallel: int | None = setting(
        None, "GPUs per copy of the model; None uses as few as can hold the model and a KV cache", at_least=1
    )
    gpu_memory_utilization: float | None = setting(
        None, "fraction of GPU memory; None is 0.85, or what the trainer leaves of a shared GPU", within=(0.0, 1.0)
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "precision of the server; auto is the checkpoint's on a GPU and float32 on a CPU"
    )
    start_timeout_s: float | None = setting(
        None,
        "limit for the start, which loads the weights and compiles; None is 600 s plus a second per 50 MB of weights",
        within=AT_MOST_A_DAY,
    )
    vllm_args: str = setting(
        "", "additional options of vLLM's server, as on its command line, such as '--max-num-batched-tokens 8192'"
    )

    model_path: Path = setting(Path(), "folder of the base model", by_run=True)
    max_lora_rank: int = setting(32, "maximum adapter rank, one of those that vLLM supports", by_run=True)
    max_adapters: int = setting(4, "maximum number of loaded adapters", by_run=True)
    adapts_vision: bool = setting(False, "apply adapters to vision tower and merger, too", by_run=True)
    image_cache_gib: float = setting(
        4.0, "main memory for processed images, so that none is processed again", by_run=True
    )
    kv_cache_gib: float = setting(1.0, "memory for the KV cache on CPU, GiB", by_run=True)
    gpu_names: tuple[str, ...] = setting((), "its GPUs in CUDA_VISIBLE_DEVICES; () are all visible ones", by_run=True)
    host: str = setting("127.0.0.1", "address to listen on, beside a port", by_run=True)
    adapter_folder: Path | None = setting(
        None, "folder for adapters that are sent to the server; None loads them from the paths of the run", by_run=True
    )

    @property
    def context_tokens(self) -> int:
        """`max_model_len`, or the default of a server that is started by itself."""
        return self.max_model_len or _CONTEXT_TOKENS


def max_lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` that vLLM accepts and that fits `rank`."""
    fitting = [allowed for allowed in _LORA_RANKS if allowed >= rank]
    if not fitting:
        raise ConfigError(f"lora_rank: expected at most {_LORA_RANKS[-1]}, got {rank}; lower it")
    return fitting[0]
