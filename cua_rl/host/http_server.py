"""Serves an ASGI app inside the running event loop, and limits what a client can cost.

uvicorn has a timeout between requests only. Here the head of a request has a timeout too, and the number of connections
per peer that have not sent one is limited, so slow or idle clients cannot block others.
"""

import asyncio
import functools
import logging
import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from cua_rl.host.processes import is_loopback
from cua_rl.host.system import raise_descriptor_limit
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of a client."""

    head_s: float = 10.0
    """Time to send the head of a request, or the rest of a body whose response has been sent."""
    stall_s: float = 60.0
    """Time that it may leave a response unread."""
    head_bytes: int = 64 * 2**10
    """Size of a head, or of trailers after a chunked body: parsing time grows with the square of it."""
    max_waiting: int = 512
    """Connections of one peer that have not sent a complete head; beyond this, the oldest ones are closed."""
    burst_s: float = 5.0
    """Younger connections are not closed, because many clients may connect at the same moment."""
    max_connections: int = 2048
    """Connections of one peer: as many as the rollouts of a large step may open on one machine."""
    descriptor_frac: float = 0.5
    """Share of the files that the process may open for the connections of all peers; the rest is for its own work."""


_LIMITS = ConnectionLimits()


class _Cycle(Protocol):
    """A request and its answer in uvicorn."""

    scope: Scope
    response_complete: bool
    more_body: bool
    body: bytes
    """What has arrived and was not read yet."""


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
    """A connection served by uvicorn and closed when its client exceeds a limit."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: Any = None,
        *,
        peers: "_Peers",
    ) -> None:
        # not httptools: it makes a request of every head that has arrived, before the first one is answered
        make = cast("Any", H11Protocol)
        self._served: _Served = make(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self._peers = peers
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.peer = ""
        self.is_leaving = False
        """Whether the response has been sent, and what still arrives is discarded."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""  # pyright: ignore[reportUnknownArgumentType] - untyped in asyncio
        self._loop = asyncio.get_running_loop()
        self._served.connection_made(cast("asyncio.Transport", _ServedTransport(self._transport, self)))
        self._peers.add(self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        self._peers.remove(self)
        self._served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_leaving:
            return
        earlier = self._served.cycle
        num_body_bytes = 0 if earlier is None else len(earlier.body)
        self._served.data_received(data)
        cycle = self._served.cycle
        has_advanced = cycle is not None and (cycle is not earlier or len(cycle.body) > num_body_bytes)
        if has_advanced:
            self._head_bytes = 0
        # the rest of a refused body may still arrive
        elif cycle is None or not _is_leaving_body(cycle):
            self._head_bytes += len(data)
            if self._head_bytes > self._peers.limits.head_bytes:
                self.drop()
                return
        if cycle is not None and not cycle.response_complete:
            if self._head_timer is not None:
                self._stop_waiting()
        elif self._head_timer is None and not self._transport.is_closing():
            self._wait_for_head()

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._stall_timer = self._loop.call_later(self._peers.limits.stall_s, self.drop)
        self._served.pause_writing()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
            self._served.resume_writing()

    def leave(self) -> None:
        """Close, but after the rest of a body: a client that is reset while it sends cannot read the response."""
        cycle = self._served.cycle
        if self.is_leaving or cycle is None or not (cycle.response_complete and cycle.more_body):
            self._transport.close()
            return
        self.is_leaving = True
        self._transport.write_eof()
        self._transport.resume_reading()
        if self._head_timer is None:
            self._wait_for_head()

    def drop(self) -> None:
        """Close at once, without a response."""
        self._transport.abort()

    def _wait_for_head(self) -> None:
        self._head_timer = self._loop.call_later(self._peers.limits.head_s, self.drop)
        self._peers.wait(self)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._peers.stop_waiting(self)


class _ServedTransport:
    """The transport as uvicorn sees it, whose `close` may wait for the client."""

    def __init__(self, transport: asyncio.Transport, connection: LimitedConnection) -> None:
        self._transport = transport
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.is_leaving or self._transport.is_closing()

    def close(self) -> None:
        self._connection.leave()


def _is_leaving_body(cycle: _Cycle) -> bool:
    """Whether the client is still sending an unread body of known length; a chunked one may have endless trailers."""
    is_in_chunks = any(name == b"transfer-encoding" for name, _ in cycle.scope["headers"])
    return cycle.response_complete and cycle.more_body and not is_in_chunks


class _Peers:
    """The connections of a server by the address of their clients."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._num_open: dict[str, int] = {}
        self._max_open = int(limits.descriptor_frac * raise_descriptor_limit())
        self._waiting: dict[str, dict[LimitedConnection, float]] = {}

    def add(self, connection: LimitedConnection) -> None:
        """Count a connection; beyond a limit, the one that has waited longest is closed, or else this one.

        If there are too many in all, the peer with the most that wait loses one.
        """
        self._num_open[connection.peer] = self._num_open.get(connection.peer, 0) + 1
        if self._num_open[connection.peer] > self.limits.max_connections:
            next(iter(self._waiting.get(connection.peer, {})), connection).drop()
        elif sum(self._num_open.values()) > self._max_open:
            most = max(self._waiting.values(), key=len, default=dict[LimitedConnection, float]())
            next(iter(most), connection).drop()

    def remove(self, connection: LimitedConnection) -> None:
        self._num_open[connection.peer] -= 1
        if not self._num_open[connection.peer]:
            del self._num_open[connection.peer]

    def wait(self, connection: LimitedConnection) -> None:
        """Note that a head is awaited; beyond the limit, connections that have waited for `burst_s` are closed."""
        now = time.monotonic()
        waiting = self._waiting.setdefault(connection.peer, {})
        waiting[connection] = now
        num_over = len(waiting) - self.limits.max_waiting
        for oldest, since in list(waiting.items())[: max(0, num_over)]:
            if now - since < self.limits.burst_s:
                break
            oldest.drop()

    def stop_waiting(self, connection: LimitedConnection) -> None:
        waiting = self._waiting.get(connection.peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.peer, None)


class _QuietServer(uvicorn.Server):
    """A server that installs no signal handlers, and sets `ready` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serve_app(
    app: ASGIApp, host: str, port: int, *, grace_s: int = 5, limits: ConnectionLimits = _LIMITS
) -> AsyncGenerator[str]:
    """Serve an app while the block runs and yield its root address; port 0 takes a free one.

    At the end of the block, open requests have `grace_s` seconds before they are cancelled. Raises `ConfigError` if it
    cannot listen on host and port.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # the rollouts of a step may all connect at once
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"port: expected a free port, got {host}:{port} ({error}); choose another one, or 0 for any"
        ) from None
    bound_host, bound_port = listener.getsockname()[:2]
    url = f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"
    if not is_loopback(bound_host):
        logger.warning("other machines can connect to %s: it requires a secret, but nothing is encrypted", url)
    protocol = functools.partial(LimitedConnection, peers=_Peers(limits))
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_s,
        proxy_headers=False,  # headers must not change the scheme and the peer of the socket
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name=f"serve-{bound_port}")
    try:
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        yield url
    finally:
        server.should_exit = True
        await serving
        # uvicorn overlooks a connection accepted while it shuts down, and would serve it
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()
        listener.close()
