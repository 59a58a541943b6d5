"""Serving an ASGI app on a socket from inside the controller's event loop."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.applications import Starlette

from cua_rl.errors import ConfigError


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serve_app(app: Starlette, host: str, port: int, *, grace_s: int = 5) -> AsyncGenerator[str]:
    """Serve until left; gives the root address. Port 0 takes a free one.

    Requests that are not answered within `grace_s` seconds of leaving are cancelled.

    Raises:
        ConfigError: the port is taken.
    """
    listener = _listen(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}"
    server = _QuietServer(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve-gateway")
    try:
        yield address
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"expected a free port for the gateway, got {host}:{port} ({error.strerror}); choose another one"
        ) from error
    listener.listen(2048)
    return listener
