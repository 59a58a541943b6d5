"""An OpenAI-compatible endpoint that says what it is told, in both APIs; it checks the key."""

import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

KEY = "the-endpoints-key"
GIVE_UP = '{"action": "terminate", "status": "failure"}'
TAP = '{"action": "click", "coordinate": [500, 500]}'


@dataclass
class FakeEndpoint:
    """Calls `mobile_use` with `arguments` in turn, then with the last of them; keeps what it was asked."""

    arguments: deque[str] = field(default_factory=lambda: deque([GIVE_UP]))
    failures: deque[tuple[int, str]] = field(default_factory=deque)
    """Status and error code of the next answers."""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _responses(self, request: Request) -> Response:
        refusal, arguments = await self._next(request)
        call = {"type": "function_call", "id": "fc", "call_id": f"c{len(self.requests)}", "name": "mobile_use"}
        output = [
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            call | {"arguments": arguments},
        ]
        usage = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
        return refusal or JSONResponse({"status": "completed", "output": output, "usage": usage})

    async def _chat(self, request: Request) -> Response:
        refusal, arguments = await self._next(request)
        call = {"id": f"c{len(self.requests)}", "type": "function"}
        call["function"] = {"name": "mobile_use", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return refusal or JSONResponse({"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    async def _next(self, request: Request) -> tuple[Response | None, str]:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _refusal(401, "invalid_api_key"), ""
        self.requests.append(await request.json())
        if self.failures:
            return _refusal(*self.failures.popleft()), ""
        return None, self.arguments.popleft() if len(self.arguments) > 1 else self.arguments[0]


def _refusal(status: int, code: str) -> Response:
    headers = {"retry-after-ms": "1"}
    return JSONResponse({"error": {"message": "no", "code": code}}, status, headers=headers)


class Served(Protocol):
    """A double with an ASGI application."""

    def app(self) -> Starlette: ...


@contextmanager
def serve_in_thread(endpoint: Served) -> Generator[str]:
    """Serve it beside a program under test; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(endpoint.app(), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
