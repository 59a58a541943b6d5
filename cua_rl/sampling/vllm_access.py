"""ASGI middleware for vLLM (`--middleware`) that requires the key for every path, not only below `/v1`."""

import os
from collections.abc import Awaitable, Callable, Mapping
from secrets import compare_digest
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """Refuses requests without the key in `VLLM_API_KEY`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 before its body is read."""
        if scope["type"] == "lifespan" or compare_digest(authorization(scope), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "Unauthorized"}}'})


def authorization(scope: Scope) -> bytes:
    """The Authorization header of a request; empty without one."""
    return next((value for name, value in scope["headers"] if name == b"authorization"), b"")
