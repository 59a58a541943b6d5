"""Show training runs in the browser: `python -m cua_rl.recipes.serve_monitor [DATABASE_URL | run folder] key=value ...`.

With nothing named, the database of the environment, else the runs in ./runs.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import chz
import uvicorn

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.session import check_connection, database_url
from cua_rl.errors import ConfigError
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.security import LOOPBACK_HOSTS, AccessRules, make_token
from cua_rl.recipes.run_recipe import run_recipe


@chz.chz
class MonitorConfig:
    """Show training runs in the browser."""

    source: str | None = chz.field(
        default=None, doc="database URL, or folder of a run; None is the database of the environment, else ./runs"
    )
    host: str = chz.field(
        default="127.0.0.1", doc="address to listen on; elsewhere than on loopback, reading needs a token"
    )
    port: int = chz.field(default=8720, doc="port to listen on, 0 for a free one")


async def cli_main(config: MonitorConfig) -> None:
    """Serve until interrupted."""
    async with AsyncExitStack() as stack:
        url = await _open_source(stack, config.source)
        await migrate(url)
        rules = AccessRules(
            write_token=os.environ.get("MONITOR_WRITE_TOKEN") or make_token(),
            read_token=os.environ.get("MONITOR_READ_TOKEN"),
            hosts=(*LOOPBACK_HOSTS, config.host),
        )
        app = make_app(Databases([open_database(url)]), rules)
        settings = uvicorn.Config(guard(app, rules), host=config.host, port=config.port, log_level="warning")
        print(f"monitor: http://{config.host}:{config.port}/#token={rules.write_token}", flush=True)
        await uvicorn.Server(settings).serve()


async def _open_source(stack: AsyncExitStack, source: str | None) -> str:
    url = database_url(os.environ) if source is None else source
    if url is not None and "://" in url:
        await check_connection(url)
        return url
    if source is None:
        raise ConfigError("expected a database URL or the folder of a run, got none; name one")
    data = Path(source).expanduser().absolute() / "postgres"
    if not data.is_dir():
        raise ConfigError(f"expected a database URL or the folder of a run, got {source!r}; name another one")
    running = running_postgres_url(data)
    if running is not None:
        return running
    return (await stack.enter_async_context(EmbeddedPostgres(data, data.parent / "logs" / "postgres.log"))).url


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line; a first argument without a name is the source."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (
        arguments
        and not arguments[0].startswith("-")
        and ("=" not in arguments[0] or "://" in arguments[0].split("=")[0])
    ):
        arguments[0] = f"source={arguments[0]}"
    return run_recipe(MonitorConfig, cli_main, arguments)


if __name__ == "__main__":
    sys.exit(main())
