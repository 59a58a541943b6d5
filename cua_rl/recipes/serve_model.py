"""Serve a model to runs on other hosts: `python -m cua_rl.recipes.serve_model model_name=... host=10.0.0.5 port=8000`.

The server has what training needs (docs/models.md), takes adapters over HTTP, so that no folder has to be shared, and
is started again if it dies. Its key is `VLLM_API_KEY`, which the runs that use it need too (`base_url=...`). With
`num_replicas=2` there are two, on nodes of a Ray cluster.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz

from cua_rl.command_line.fields import Given, check_numbers, setting, with_presets
from cua_rl.command_line.recipe import run_recipe
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.run.model_servers import Served, announce, keep_replicas, keep_serving, open_server
from cua_rl.run_folder.model_folder import absolute_if_folder
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig
from cua_rl.types.errors import ConfigError

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
    host: str = setting("127.0.0.1", "address of this host to listen on; choose one in the network of the runs")
    lora_rank: int = setting(32, "largest lora_rank of the runs", at_least=1)
    num_replicas: int | None = setting(
        None,
        "servers on nodes of the Ray cluster at RAY_ADDRESS, each with server.tensor_parallel GPUs and its own port, "
        "from server.port on; None serves on this host",
        at_least=1,
    )
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    log_file: Path = setting(Path("vllm.log"), "file for the server's output")

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


async def cli_main(config: ServeModelConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Serve until cancelled."""
    key, num_replicas = require_key(environ.get(API_KEY_VARIABLE)), config.num_replicas
    log_path = await asyncio.to_thread(config.log_file.absolute)
    wanted = Served(
        model_name=absolute_if_folder(config.model_name),
        lora_rank=config.lora_rank,
        server=config.server,
        host=config.host,
        log_path=log_path,
    )
    if num_replicas is not None:
        await keep_replicas(wanted, num_replicas, key, environ)
    async with open_server(wanted, environ) as server:
        announce(server.base_url)
        await keep_serving(server)


def require_key(key: str | None) -> str:
    """The key; raises `ConfigError` if it is missing, or easy to guess."""
    if key is None or len(key) < _SHORTEST_KEY:
        raise ConfigError(
            f"{API_KEY_VARIABLE}: expected the key of the server, at least {_SHORTEST_KEY} characters, got "
            f"{'none' if not key else len(key)}; set it to a long random text, here and where the runs are"
        )
    return key


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    return run_recipe(ServeModelConfig, cli_main, argv, SERVE_PRESETS)


if __name__ == "__main__":
    sys.exit(main())
