"""Serve a model to runs on other hosts: `python -m cua_rl.recipes.serve_model model_name=... host=10.0.0.5 port=8000`.

The server has what training needs (docs/models.md), takes adapters over HTTP, so that no folder has to be shared, and
is started again if it dies. Its key is `VLLM_API_KEY`, which the runs that use it need too (`base_url=...`). With
`num_replicas=2` there are two, on nodes of a Ray cluster.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.model_servers import SERVE_PRESETS, ServeModelConfig, announce, keep_replicas, keep_serving, open_server
from cua_rl.run_folder.model_folder import absolute_if_folder
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.types.errors import ConfigError

_SHORTEST_KEY = 16


async def cli_main(config: ServeModelConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Serve until cancelled."""
    key = require_key(environ.get(API_KEY_VARIABLE))
    log_file = await asyncio.to_thread(config.log_file.absolute)
    config = with_values(config, model_name=absolute_if_folder(config.model_name), log_file=log_file)
    if config.num_replicas is not None:
        await keep_replicas(config, config.num_replicas, key, environ)
    async with open_server(config, environ) as server:
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
