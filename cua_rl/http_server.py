"""Serves an ASGI app on a socket, inside the running event loop."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from cua_rl.errors import ConfigError


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process it runs in, and sets `ready` when it listens."""

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
async def serve_app(app: ASGIApp, host: str, port: int, *, grace_s: int = 5) -> AsyncGenerator[str]:
    """Serve an app while the block runs and yield its root address; port 0 takes a free one.

    Requests that are not answered within `grace_s` seconds of leaving are cancelled.

    Raises:
        ConfigError: cannot listen on host and port.
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
    server = _QuietServer(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s, proxy_headers=False
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name=f"serve-{bound_port}")
    try:
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        yield f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
