"""What strangers send to gateway and monitor costs nobody else memory or time: against processes of their own."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from scripts.monitor_process import monitor_process
from tests.real.database.conftest import server_url, url

__all__ = ["server_url", "url"]

MAX_GROWTH_BYTES = 150 * 2**20
MAX_WAIT_S = 1.0
"""A thousand connections at a third of a millisecond of processor time each, three times over."""


async def answer_of(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    """Ask until there is an answer: on a busy machine, a head can take as long as those of attackers at our address."""
    while True:
        with suppress(httpx.ReadError):
            (await client.get(path, headers=headers)).raise_for_status()
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server under attack, and a request that must go on being answered."""

    base_url: str
    process: psutil.Process
    others_ask: str
    key: str = ""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        return str(parts.hostname), int(parts.port or 0)

    def peak_bytes(self) -> int:
        """The most memory that the process ever had."""
        (line,) = [
            line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "VmHWM" in line
        ]
        return int(line.split()[1]) * 1024

    def worked_s(self) -> float:
        """Processor time of the server so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    async def slowest_s(self, attack: Callable[[], Awaitable[None]]) -> float:
        """How long others waited at most while the attack went on, as far as the server was at work meanwhile.

        The rest of a wait is that of a machine which is busy with other tests.
        """
        waits: list[float] = []

        async def ask() -> None:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            while True:  # a new connection each time: those that are open already are no measure
                async with httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=60) as client:
                    started, worked_s = time.monotonic(), self.worked_s()
                    await answer_of(client, self.others_ask, headers)
                    waits.append(min(time.monotonic() - started, self.worked_s() - worked_s))
                await asyncio.sleep(0.02)

        asking = asyncio.create_task(ask())
        try:
            await attack()
            while not waits and not asking.done():  # the attack was refused at once
                await asyncio.sleep(0.01)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        if asking.done() and not asking.cancelled():
            asking.result()
        return max(waits)


@asynccontextmanager
async def gateway() -> AsyncGenerator[Target]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.real.gateway_process"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url, key = (await process.stdout.readline()).decode().split()
        yield Target(base_url=url, process=psutil.Process(process.pid), others_ask="/rollouts/r/v1/models", key=key)
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def monitor(database_url: str, folder: Path) -> AsyncGenerator[Target]:
    async with monitor_process(database_url, folder) as served:
        yield Target(base_url=served.base_url, process=served.find(), others_ask="/api/runs")


async def require_unharmed(target: Target, attack: Callable[[], Awaitable[None]]) -> None:
    before = target.peak_bytes()
    assert await target.slowest_s(attack) < MAX_WAIT_S
    assert target.peak_bytes() - before < MAX_GROWTH_BYTES


async def upload(target: Target, path: str, num_bytes: int) -> int:
    """Post `[],[],...` whatever the server says; returns the status, 0 if the server hangs up before it is read."""

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"["
        for _ in range(num_bytes // 2**18):
            yield (b"[]," * 2**17)[: 2**18]

    headers = {"Content-Type": "application/json", "Authorization": "Bearer wrong"}
    async with httpx.AsyncClient(base_url=target.base_url, trust_env=False, timeout=60) as client:
        with suppress(httpx.NetworkError):
            return (await client.post(path, content=pieces(), headers=headers)).status_code
    return 0


NOTHING = b""
HALF_A_HEAD = b"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\nX-A: "
HALF_A_BODY = (
    b"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n["
)
UNREAD_EVENTS = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def half_open(target: Target, path: str) -> None:
    """Hundreds of connections that get no further, for three seconds."""
    sockets: list[socket.socket] = []
    try:
        for sent, count in ((NOTHING, 300), (HALF_A_HEAD, 300), (HALF_A_BODY, 300), (UNREAD_EVENTS, 100)):
            for _ in range(count):
                sockets.append(await asyncio.to_thread(socket.create_connection, target.address, 10))
                sockets[-1].sendall(sent.replace(b"{path}", path.encode()))
        await asyncio.sleep(3.0)
    finally:
        for one in sockets:
            one.close()


@pytest.mark.timeout(120)
async def test_strangers_cost_the_agents_of_a_gateway_nothing() -> None:
    async with gateway() as target:

        async def bodies() -> None:
            for rollout_id in ("unknown", "r"):
                assert await upload(target, f"/rollouts/{rollout_id}/v1/responses", 120_000_000) in (0, 401)

        await require_unharmed(target, bodies)
        await require_unharmed(target, lambda: half_open(target, "/rollouts/r/v1/responses"))


@pytest.mark.timeout(180)
async def test_strangers_cost_the_readers_of_a_monitor_nothing(url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(monitor(url, tmp_path))

        async def bodies() -> None:
            assert await upload(target, "/api/ingest/batch", 60_000_000) in (0, 401)

        await require_unharmed(target, bodies)
        await require_unharmed(target, lambda: half_open(target, "/api/session"))
        await require_unharmed(target, lambda: half_open(target, "/api/ingest/batch"))
