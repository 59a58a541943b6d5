"""Serves the monitor on a socket."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from cua_rl.errors import ConfigError
from cua_rl.request_limits import server_config

_GRACE_S = 1  # event streams never end by themselves


class _QuietServer(uvicorn.Server):
    """Leaves signal handling to the process, and sets `ready` when it listens."""

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
async def serving(app: ASGIApp, host: str, port: int) -> AsyncGenerator[str]:
    """Serve while the context is open; yields the address. Port 0 picks a free port.

    Raises:
        ConfigError: cannot listen on host and port.
    """
    listener = _listen(host, port)
    bound_host, bound_port = listener.getsockname()[:2]
    server = _QuietServer(server_config(app, grace_s=_GRACE_S))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="serve-monitor")
    try:
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        yield f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _error(host, port, error) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(512)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _error(host, port, error) from None
    return listener


def _error(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"port: expected a free port, got {host}:{port} ({error}); choose another one, or 0 for any")
