"""Show training runs in the browser: `python -m cua_rl.recipes.serve_monitor [SOURCE] key=value ...`.

SOURCE is a database URL, the folder of a run, or a folder of runs. Without it, the database of the environment, else
the runs in ./runs. Put a URL with a password into DATABASE_URL: all users of the machine can read arguments.
`create_project=NAME` prints a token with which other machines send their runs, and exits.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.migrations import migrate
from cua_rl.database.session import check_connection, database_url, make_writer_engine
from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import freeze_loaded_objects, is_loopback
from cua_rl.monitor.alert_watch import watching
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, RunFolder, open_database
from cua_rl.monitor.live import LiveFeed
from cua_rl.monitor.prices import Prices, load_prices
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.run_folders import find_runs, has_database, show_folder, show_runs_below
from cua_rl.monitor.security import LOOPBACK_HOSTS, AccessRules, make_token
from cua_rl.types.errors import ConfigError

DEFAULT_PORT = 8720


@chz.chz
class MonitorConfig:
    """Show training runs in the browser."""

    source: str | None = setting(
        None,
        "database URL (put one with a password into DATABASE_URL), folder of a run, or folder of runs; None is the "
        "database of the environment, else ./runs",
    )
    host: str = setting("127.0.0.1", "address to listen on; except on loopback, reading needs a token")
    port: int = setting(DEFAULT_PORT, "port to listen on, 0 for a free one")
    public_url: str | None = setting(
        None,
        "address at which a proxy serves the monitor, such as https://monitor.example; reading then needs a token, "
        "and with https, browsers send cookies over https only",
    )
    create_project: str | None = setting(
        None, "create a project with this name, or a new token for it, print the token and exit"
    )
    alerts_webhook: str | None = setting(
        None,
        "webhook of Slack or the like to which alerts of runs are posted as JSON; the address is a secret, so put it "
        "into MONITOR_ALERTS_WEBHOOK",
    )
    results_dir: str | None = setting(
        None, "folder below which to look for results.json files of recipes.evaluate; None is the source or ./runs"
    )
    prices: str | None = setting(
        None,
        "TOML file with prices, such as gpu_hour (docs/monitor.md), also MONITOR_PRICES; without it, costs are not "
        "shown in US dollars",
    )

    @chz.validate
    def _public_url_is_an_address(self) -> None:
        if self.public_url is not None and not self.public_url.startswith(("https://", "http://")):
            raise ValueError(
                f"public_url: expected an address such as https://monitor.example, got {self.public_url!r}; correct it"
            )

    @chz.validate
    def _webhook_is_an_address(self) -> None:
        if self.alerts_webhook is not None and not self.alerts_webhook.startswith(("https://", "http://")):
            raise ValueError(
                "alerts_webhook: expected an address that begins with https:// or http://, got another text; correct it"
            )

    @chz.validate
    def _port_exists(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(
                f"port: expected a number from 0 to 65535, got {self.port!r}; leave it out for {DEFAULT_PORT}"
            )


async def cli_main(config: MonitorConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Serve until interrupted, or make a project."""
    named = config.prices or environ.get("MONITOR_PRICES")
    prices = await asyncio.to_thread(load_prices, Path(named)) if named else Prices()
    url, folder = await _find_source(config.source, environ)
    if config.create_project is not None:
        await _create_project(config.create_project, url)
        return
    rules = _make_rules(config.host, config.public_url, environ)
    databases, feed = Databases([open_database(url)] if url else []), LiveFeed()
    results = Path(config.results_dir) if config.results_dir else folder or Path("runs")
    app = make_app(databases, rules, feed=feed, results_folder=results, prices=prices)
    async with AsyncExitStack() as stack:
        if url is not None:
            await migrate(url)
        # event streams never end by themselves, so there is nothing to wait for on leaving
        serving = serve_app(guard(app, rules), config.host, config.port, grace_s=1)
        address = await stack.enter_async_context(serving)
        freeze_loaded_objects()
        _print_address(address, rules, url, folder, environ)
        webhook = config.alerts_webhook or environ.get("MONITOR_ALERTS_WEBHOOK") or None
        await stack.enter_async_context(watching(databases, webhook, config.public_url or address))
        if folder is None:
            await asyncio.Event().wait()
        elif has_database(folder):
            shown = RunFolder(key="", path=folder)
            shown.wanted.set()
            await show_folder(databases, feed, shown)
        else:
            await show_runs_below(databases, feed, folder)


async def _find_source(source: str | None, environ: Mapping[str, str]) -> tuple[str | None, Path | None]:
    """The database that is shown, or the folder; raises `ConfigError` if there is neither."""
    environment = environ if source is None else {"DATABASE_URL": source} if "://" in source else {}
    named = database_url(environment)
    if named is not None:
        await check_connection(named)
        return named, None
    folder = await asyncio.to_thread(lambda: Path(source or "runs").expanduser().absolute())
    if source is not None and not folder.is_dir():  # the default folder may not exist yet: runs may begin later
        raise ConfigError(
            f"source: expected a database URL, or the folder of a run or of runs, got {source!r}; "
            "postgresql://user:password@host/database has the form of a URL"
        )
    return None, folder


def _make_rules(host: str, public_url: str | None, environ: Mapping[str, str]) -> AccessRules:
    """Reading is open on loopback; other addresses need a token, generated if the environment has none."""
    read_token = environ.get("MONITOR_READ_TOKEN") or None
    if read_token is None and (public_url is not None or not is_loopback(host)):
        if not sys.stdout.isatty():
            raise ConfigError(
                "MONITOR_READ_TOKEN: expected it for a monitor that others can reach, got none for "
                f"{f'public_url={public_url!r}' if public_url else f'host={host!r}'}; set it to a long random text, "
                "or listen on 127.0.0.1"
            )
        read_token = make_token()
    write_token = environ.get("MONITOR_WRITE_TOKEN") or make_token()
    for name, token in (("MONITOR_READ_TOKEN", read_token), ("MONITOR_WRITE_TOKEN", write_token)):
        if token is not None and len(token) < 16:
            raise ConfigError(f"{name}: expected at least 16 characters, got {len(token)}; choose a longer one")
    is_https = public_url is not None and public_url.startswith("https://")
    return AccessRules(write_token=write_token, read_token=read_token, hosts=(*LOOPBACK_HOSTS, host), is_https=is_https)


def _print_address(
    address: str, rules: AccessRules, url: str | None, folder: Path | None, environ: Mapping[str, str]
) -> None:
    """Print the address; generated tokens are shown once, on a terminal only, never written to a file."""
    print(f"monitor: {address}", flush=True)
    if sys.stdout.isatty():
        if not environ.get("MONITOR_WRITE_TOKEN"):
            print(f"token, for verdicts and notes: {rules.write_token}", flush=True)
        if rules.read_token and not environ.get("MONITOR_READ_TOKEN"):
            print(f"token, to read only: {rules.read_token}", flush=True)
    if folder is not None and not has_database(folder):
        num_runs = len(find_runs(folder)) if folder.is_dir() else 0
        print(f"runs in {folder}: {num_runs or 'none yet; they appear when they begin'}", flush=True)
    elif url is not None:
        print("runs of the database that the environment or the command line names", flush=True)


async def _create_project(name: str, url: str | None) -> None:
    if url is None:
        raise ConfigError(
            f"create_project: expected a database for what projects send, got none for {name!r}; set DATABASE_URL or "
            "name the database"
        )
    await migrate(url)
    engine = make_writer_engine(url)
    try:
        project_id, token = await asyncio.to_thread(create_project, engine, name)
    finally:
        engine.dispose()
    print(f"project_id={project_id}")
    print(f"project_token={token}")
    print("The token is shown only once; create the project again for a new one.", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line; a first argument without a name is the source."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else "--help="
    if not first.startswith("-") and "=" not in first.split("://", 1)[0] and first != "help":
        arguments[0] = f"source={first}"
    return run_recipe(MonitorConfig, cli_main, arguments)


if __name__ == "__main__":
    sys.exit(main())
