"""What a client may cost our HTTP servers: connections, time, bytes and values of a body, wherever it comes from.

connection ── a whole head in time, few that wait for theirs per peer     LimitedConnection
  └ request ── the endpoint asks for the key, from the head alone
      └ body ── bounded in bytes and time while it arrives                read_body
          └ JSON ── bounded in values and depth, off the event loop       read_json
"""

import asyncio
import functools
import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cua_rl.errors import CuaError

HEAD_S = 10.0
"""How long a client may take for the head of a request, or go on sending one that has its answer."""
STALL_S = 60.0
"""How long a client may leave an answer unread."""
MAX_HEAD_BYTES = 64 * 2**10
MAX_WAITING = 128
"""Connections of one peer without a whole head; with more, the oldest ones are closed."""
MAX_CONNECTIONS = 2048
"""Connections of one peer: as many as all rollouts of a large step may open on one machine."""
_BURST_S = 1.0  # many clients that connect at the same moment are no attack: their heads follow at once
BODY_S, MIN_BYTES_PER_S = 10.0, 100_000
"""A body may take this long, and longer only as long as it arrives at this rate."""
MAX_VALUES = 2_000_000
"""Of a body of JSON: parsing them takes 0.2 s and at most 150 MB, however the bytes are arranged."""
MAX_DEPTH = 64
_INLINE_BYTES = 64 * 2**10  # parsed within a millisecond, about what a thread costs


class RequestRefused(CuaError):
    """A request whose head or body breaks a rule that holds for all of them."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def server_config(app: ASGIApp, *, grace_s: int) -> uvicorn.Config:
    """Settings of a server whose clients have limits; its scheme and peers are those of the socket, not of headers."""
    protocol = functools.partial(LimitedConnection, peers=_Peers())
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_s,
        proxy_headers=False,
    )


class _Cycle(Protocol):
    """A request and its answer in uvicorn, with either of its parsers."""

    response_complete: bool
    more_body: bool


class _Served(Protocol):
    """uvicorn's own handling of a connection."""

    cycle: _Cycle | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class LimitedConnection(asyncio.Protocol):
    """A connection that uvicorn serves as long as its client keeps to the limits.

    uvicorn itself has a time limit between requests only, and none for what a head may hold.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: Any = None,
        *,
        peers: "_Peers",
    ) -> None:
        make = cast("Any", AutoHTTPProtocol)
        self._served: _Served = make(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self._peers = peers
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""  # pyright: ignore[reportUnknownArgumentType] - untyped in asyncio
        self._loop = asyncio.get_running_loop()
        self._served.connection_made(transport)
        self._peers.add(self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        self._peers.remove(self)
        self._served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._served.data_received(data)
        cycle = self._served.cycle
        if cycle is not None and not cycle.response_complete:
            if self._head_timer is not None:
                self._stop_waiting()
        elif self._transport.is_closing():
            return
        else:
            if self._head_timer is None:
                self._wait_for_head()
            if cycle is None or not cycle.more_body:  # the rest of a body that was refused may still be on its way
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.drop()

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._stall_timer = self._loop.call_later(STALL_S, self.drop)
        self._served.pause_writing()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
            self._served.resume_writing()

    def drop(self) -> None:
        """Close at once, without an answer."""
        self._transport.abort()

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self._loop.call_later(HEAD_S, self.drop)
        self._peers.wait(self)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._peers.stop_waiting(self)


class _Peers:
    """The connections of a server by the address of their clients."""

    def __init__(self) -> None:
        self._num_open: dict[str, int] = {}
        self._waiting: dict[str, dict[LimitedConnection, float]] = {}

    def add(self, connection: LimitedConnection) -> None:
        """Count a connection; beyond the limit, it takes the place of the one that has waited longest, or is closed."""
        self._num_open[connection.peer] = self._num_open.get(connection.peer, 0) + 1
        if self._num_open[connection.peer] > MAX_CONNECTIONS:
            next(iter(self._waiting.get(connection.peer, {})), connection).drop()

    def remove(self, connection: LimitedConnection) -> None:
        self._num_open[connection.peer] -= 1
        if not self._num_open[connection.peer]:
            del self._num_open[connection.peer]

    def wait(self, connection: LimitedConnection) -> None:
        """Note that a head is awaited; the oldest connections that have long waited for theirs make room."""
        now = time.monotonic()
        waiting = self._waiting.setdefault(connection.peer, {})
        waiting[connection] = now
        num_over = len(waiting) - MAX_WAITING
        for oldest, since in list(waiting.items())[: max(0, num_over)]:
            if now - since < _BURST_S:
                break
            oldest.drop()

    def stop_waiting(self, connection: LimitedConnection) -> None:
        waiting = self._waiting.get(connection.peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.peer, None)


def host_name(host: str) -> str:
    """The name in a Host header or an address, without its port; empty if there is none."""
    try:
        return urlsplit(host if "//" in host else f"//{host}").hostname or ""
    except ValueError:
        return ""


def bearer_key(request: Request) -> str:
    """The key in `Authorization: Bearer`, empty if there is none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


@dataclass(slots=True)
class BodyBudget:
    """How many bytes of bodies a client's unanswered requests may hold together."""

    max_bytes: int
    num_bytes: int = 0

    @contextmanager
    def hold(self) -> Generator["HeldBody"]:
        """The share of one request, returned when it has its answer."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes


@dataclass(slots=True)
class HeldBody:
    """The bytes of one body."""

    budget: BodyBudget
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Take bytes from the budget; raises `RequestRefused` if it does not have them."""
        if self.num_bytes + num_bytes > self.budget.max_bytes:
            raise RequestRefused(413, f"expected a body of at most {self.budget.max_bytes} bytes; send smaller ones")
        if self.budget.num_bytes + num_bytes > self.budget.max_bytes:
            raise RequestRefused(429, "expected fewer large bodies at once, got more; wait for an answer")
        self.budget.num_bytes += num_bytes
        self.num_bytes += num_bytes


def require_json(request: Request) -> None:
    """Raise `RequestRefused` for a body that is not plain JSON: a browser sends it to other sites without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(415, f"expected Content-Type: application/json, got {kind[:100]!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestRefused(415, f"expected a body without Content-Encoding, got {encoding[:100]!r}; send it as it is")


async def read_body(request: Request, held: HeldBody) -> bytes:
    """The body, counted while it arrives; raises `RequestRefused` if it is too long, too slow or not finished."""
    loop = asyncio.get_running_loop()
    started, body = loop.time(), bytearray()
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and int(told[:20]) > held.budget.max_bytes:
        held.add(int(told[:20]))
    try:
        async with asyncio.timeout_at(started + BODY_S) as deadline:
            async for piece in request.stream():
                held.add(len(piece))
                body += piece
                deadline.reschedule(started + BODY_S + len(body) / MIN_BYTES_PER_S)
    except TimeoutError:
        raise RequestRefused(408, f"expected the whole body in time, got {len(body)} bytes; send it faster") from None
    except ClientDisconnect:
        raise RequestRefused(400, f"expected a whole body, the client left after {len(body)} bytes") from None
    return bytes(body)


async def read_json(request: Request, held: HeldBody) -> object:
    """The body as JSON; raises `RequestRefused`."""
    return await parse_body(await read_body(request, held))


async def parse_body(body: bytes) -> object:
    """JSON, parsed in a thread if it is large; raises `RequestRefused`."""
    return parse_json(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse_json, body)


def parse_json(text: bytes | str) -> object:
    """A JSON value of limited size and depth.

    The limit is checked before the parser runs, because it holds the interpreter's lock to its end: a thread alone
    would not keep the event loop free.

    Raises:
        RequestRefused: the text is none; invalid JSON is its cause.
    """
    marks = (b",", b":", b"[", b"{") if isinstance(text, bytes) else (",", ":", "[", "{")
    counts = [text.count(cast("Any", mark)) for mark in marks]
    if sum(counts) > MAX_VALUES:
        raise RequestRefused(413, f"expected at most {MAX_VALUES} values in a body, got more; send smaller ones")
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise RequestRefused(400, f"expected JSON, got {error}; send JSON") from error
    except RecursionError:
        raise _too_deep() from None
    if counts[2] + counts[3] > MAX_DEPTH:
        check_depth(value)
    return value


def check_depth(value: object) -> None:
    """Raise `RequestRefused` for JSON that is nested more deeply than anything that means something."""
    front, depth = [value], 0
    while front:
        if depth > MAX_DEPTH:
            raise _too_deep()
        depth += 1
        containers = [item for item in front if isinstance(item, dict | list)]
        front = [
            inner
            for item in cast("list[dict[str, object] | list[object]]", containers)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


def _too_deep() -> RequestRefused:
    return RequestRefused(400, f"expected JSON at most {MAX_DEPTH} levels deep, got more")
