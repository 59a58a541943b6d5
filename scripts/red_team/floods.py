"""What peers send to a server to stop it, and what that costs all others."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from PIL import Image

from cua_rl.host.system import raise_descriptor_limit

T = TypeVar("T")

MAX_GROWTH_BYTES = 150 * 2**20
MAX_WAIT_S = 1.0
"""A thousand connections at a third of a millisecond of processor time each, three times over."""

NOTHING = b""
HEAD = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_A_HEAD = b"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\nX-A: "
UNREAD_EVENTS = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


def half_a_body(path: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n["
    )
    return head.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server under attack, and a request that must go on being answered."""

    base_url: str
    pid: int
    others_ask: str
    key: str = ""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        return str(parts.hostname), int(parts.port or 0)

    def post(self, path: str, **given: Any) -> int:
        """The status of the answer, 0 if the server hangs up."""
        with suppress(httpx.TransportError):
            return httpx.post(self.base_url + path, trust_env=False, timeout=60, **given).status_code
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an attack cost."""

    wait_s: float
    """How long others waited at most for an answer, as far as the server was at work meanwhile."""
    growth_bytes: int
    """How far the peak of the server's memory rose."""

    def is_small(self, num_mb: int = 0) -> bool:
        """Whether it is little for so many megabytes that the server has read with a valid key."""
        return self.wait_s < MAX_WAIT_S and self.growth_bytes < MAX_GROWTH_BYTES + 4 * num_mb * 2**20

    def __str__(self) -> str:
        return f"others wait {self.wait_s:.2f} s, {self.growth_bytes / 2**20:.0f} MiB more"


def small_cost(num_mb: int = 0) -> str:
    """What is expected, in words."""
    return f"others wait < {MAX_WAIT_S:g} s, < {MAX_GROWTH_BYTES // 2**20 + 4 * num_mb} MiB more"


def cost_of(server: Server, attack: Callable[[], T]) -> tuple[Cost, T]:
    """Attack while a process of its own asks for a page all the time; what others pay, and what the attack got."""
    before = peak_bytes(server.pid)
    asking = subprocess.Popen(
        [sys.executable, "-m", __name__, server.base_url + server.others_ask, server.key, str(server.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"
        got = attack()
    finally:
        said, _ = asking.communicate("stop\n", timeout=300)
    return Cost(wait_s=float(said), growth_bytes=peak_bytes(server.pid) - before), got


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever held."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def upload(server: Server, path: str, num_mb: int) -> int:
    """Post `[[],[],...` with a wrong key, whatever the server says; the status."""
    pieces = (b"[" if number == 0 else b"[]," * 83_333 for number in range(num_mb * 4 + 1))
    return server.post(path, content=pieces, headers={"Content-Type": "application/json", "Authorization": "Bearer no"})


def many_scans(number: int) -> bytes:
    """A progressive JPEG of 40 megapixels whose last scan, of a few bytes, is repeated."""
    encoded = BytesIO()
    Image.new("L", (6320, 6320), 128).save(encoded, "JPEG", progressive=True)
    body = encoded.getvalue().removesuffix(b"\xff\xd9")
    return body + body[body.rindex(b"\xff\xda") :] * number + b"\xff\xd9"


def hold_connections(address: tuple[str, int], sent: Mapping[bytes, int], until: Callable[[], object]) -> None:
    """So many connections that say each of these texts and get no further, while `until` runs."""
    raise_descriptor_limit()
    with ExitStack() as stack:
        for text, count in sent.items():
            for _ in range(count):
                connection = stack.enter_context(socket.create_connection(address, 30))
                with suppress(ConnectionError):  # it may be closed at once
                    connection.sendall(text)
        until()


def pipeline_heads(address: tuple[str, int], num_mb: int) -> None:
    """One request after the other whose answers are not read, until the server takes no more for a second."""
    many = HEAD * (2**20 // len(HEAD))
    with suppress(OSError), socket.create_connection(address, 30) as connection:
        connection.settimeout(1.0)
        for _ in range(num_mb):
            connection.sendall(many)


def _worked_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(url: str, key: str, pid: int) -> float:
    """How long an answer took, as far as the server worked meanwhile: the rest is that of a busy machine."""
    began, worked_s = time.monotonic(), _worked_s(pid)
    while True:  # among a thousand connections of attackers at our address, ours may be closed for theirs
        with suppress(httpx.TransportError):
            httpx.get(url, headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False, timeout=120)
            return min(time.monotonic() - began, _worked_s(pid) - worked_s)


def main(url: str, key: str, pid: str) -> None:
    """Ask, with a new connection each time, until told to stop; print the longest wait."""
    _ask(url, key, int(pid))
    print("asking", flush=True)
    waits = [0.0]
    while len(waits) < 3 or not select.select([sys.stdin], [], [], 0.02)[0]:
        waits.append(_ask(url, key, int(pid)))
    print(max(waits), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
