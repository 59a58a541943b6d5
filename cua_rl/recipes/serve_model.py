"""Serve a model to runs on other hosts: `python -m cua_rl.recipes.serve_model model_name=... host=10.0.0.5 port=8000`.

The server has what training needs (docs/models.md), takes adapters over HTTP, so that no folder has to be shared, and
is started again if it dies. Its key is `VLLM_API_KEY`, which the runs that use it need too (`base_url=...`).
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz

from cua_rl.command_line.fields import Given, check_numbers, setting, with_presets, with_values
from cua_rl.command_line.recipe import run_recipe
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.host.processes import free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.machine.gpus import plan_gpus, visible_gpus
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.run.preflight import require_vllm_args
from cua_rl.run_folder.checkpoints import max_lora_rank
from cua_rl.run_folder.model_folder import fetch_weights, find_max_model_len, find_model, start_limit_s
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError, boundary

_SHORTEST_KEY = 16


FOR_OTHER_HOSTS: dict[str, object] = {"server.port": 8000}
SERVE_PRESETS = {"In every server for other hosts": FOR_OTHER_HOSTS}
"""What replaces defaults, for `--help` and docs/settings.md."""


def serve_presets(_: Given) -> Given:
    """A server for other hosts has a port."""
    return FOR_OTHER_HOSTS


@with_presets(serve_presets, explain_field, accept_value)
@chz.chz
class ServeModelConfig:
    """Serve a model to runs on other hosts."""

    model_name: str | None = setting(None, "folder or hub id of the model; None uses the included tiny model")
    host: str = setting("127.0.0.1", "address of this host to listen on; choose that of the network of the runs")
    lora_rank: int = setting(32, "largest lora_rank of the runs", at_least=1)
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    log_file: Path = setting(Path("vllm.log"), "file for the server's output")

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


async def cli_main(config: ServeModelConfig, environ: Mapping[str, str] = os.environ) -> None:
    require_key(environ.get(API_KEY_VARIABLE))
    wanted = config.server
    assert wanted.port is not None, "a preset ensures that"
    log_path = await asyncio.to_thread(config.log_file.absolute)
    with boundary(
        ConfigError, f"host, port: expected a free port, got {wanted.port} of {config.host!r}; choose another"
    ):
        free_port(wanted.port, config.host)
    await require_vllm_args(wanted.vllm_args, "server.vllm_args")
    with boundary(ConfigError, f"log_file: expected a file to write, got {str(log_path)!r}; choose another"):
        await asyncio.to_thread(log_path.parent.mkdir, parents=True, exist_ok=True)
        (await asyncio.to_thread(log_path.open, "ab")).close()
    model_path = await asyncio.to_thread(find_model, config.model_name)
    await asyncio.to_thread(fetch_weights, config.model_name, model_path)
    gpus = plan_gpus(
        [gpu.name for gpu in visible_gpus(environ)],
        wanted,
        TrainerConfig(),
        load_model_sizes(model_path).num_heads,
        has_trainer=False,
    )
    served = with_values(
        wanted,
        model_path=model_path,
        max_lora_rank=max_lora_rank(config.lora_rank),
        max_model_len=find_max_model_len(model_path, wanted.max_model_len, max_tokens=1),
        gpu_names=gpus.server_gpus,
        host=config.host,
        adapter_folder=await asyncio.to_thread(make_scratch_folder, "adapters"),
        start_timeout_s=wanted.start_timeout_s or start_limit_s(model_path),
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
    return run_recipe(ServeModelConfig, cli_main, argv, SERVE_PRESETS)


if __name__ == "__main__":
    sys.exit(main())
