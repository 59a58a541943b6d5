"""A monitor in a process of its own, for measurements and checks."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.recipes import serve_monitor

WRITE_TOKEN = "a-write-token-of-a-check"
READ_TOKEN = "a-read-token-of-a-check"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorProcess:
    """A monitor that answers; `owner` ends it."""

    base_url: str
    owner: OwnedProcess

    def find(self) -> psutil.Process:
        """The server's own process, not the one that guards it."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                if line[1:3] == ["-m", serve_monitor.__name__] and f"port={self.base_url.rpartition(':')[2]}" in line:
                    return child
        raise SystemExit("expected a running monitor, found none")


@asynccontextmanager
async def monitor_process(
    url: str, folder: Path, *, host: str = "127.0.0.1", port: int | None = None
) -> AsyncGenerator[MonitorProcess]:
    """Serve a database until left; `folder` takes the server's log."""
    port = free_port(host=host) if port is None else port
    tokens = {"MONITOR_WRITE_TOKEN": WRITE_TOKEN} | ({} if host == "127.0.0.1" else {"MONITOR_READ_TOKEN": READ_TOKEN})
    process = OwnedProcess(
        [sys.executable, "-m", serve_monitor.__name__, f"host={host}", f"port={port}"],
        name="monitor",
        log_path=folder / "monitor.log",
        environment=os.environ | {"DATABASE_URL": url} | tokens,
        stop_timeout_s=3.0,
    )
    async with process:
        monitor = MonitorProcess(base_url=f"http://{host}:{port}", owner=process)
        await _wait_until_ready(monitor)
        yield monitor


async def _wait_until_ready(monitor: MonitorProcess) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        while monitor.owner.is_running:
            with suppress(httpx.TransportError):
                (await client.get(f"{monitor.base_url}/api/session")).raise_for_status()
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"expected the monitor to start, it ended with:\n{monitor.owner.log_tail()}")


@asynccontextmanager
async def scratch_postgres() -> AsyncGenerator[tuple[str, Path]]:
    """An empty, migrated database that is thrown away, and a folder beside it."""
    with tempfile.TemporaryDirectory(prefix="cua_rl_check_") as name:
        folder = Path(name)
        async with EmbeddedPostgres(folder / "data", folder / "postgres.log") as postgres:
            await migrate(postgres.url)
            yield postgres.url, folder
