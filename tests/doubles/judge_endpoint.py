"""A judge's endpoint on a socket of this process: real HTTP, scripted answers, faults that can be switched on."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.host.http_server import serve_app

KEY = "a-key-of-the-judge"
MODEL = "judge-1"
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 40

Script = Callable[["Asked"], str]
"""From what it was asked to the text of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as a judge would read it."""

    number: int
    """0-based."""
    prompt: str
    record: Mapping[str, Any]
    images: tuple[str, ...]
    """data: URLs, in order."""
    body: Mapping[str, Any]


@dataclass
class JudgeEndpoint:
    """Answers with what `script` says. `statuses` come first, one a request; 0 goes well."""

    script: Script
    statuses: list[int] = field(default_factory=list[int])
    is_slow: bool = False
    """No request is answered while this holds."""
    says: str = "out of order"
    """Beside a status."""
    asked: list[Asked] = field(default_factory=list[Asked])
    num_requests: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )

    async def _models(self, request: Request) -> Response:
        if self.is_slow:
            await asyncio.Event().wait()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return JSONResponse({"data": [{"id": MODEL}]})

    async def _complete(self, request: Request) -> Response:
        self.num_requests += 1
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        if body["model"] != MODEL:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        if self.statuses and (status := self.statuses.pop(0)):
            return JSONResponse({"error": {"message": self.says}}, status, headers={"retry-after-ms": "1"})
        if self.is_slow:
            await asyncio.Event().wait()
        asked = _read(len(self.asked), body)
        self.asked.append(asked)
        return JSONResponse(_completion(self.script(asked)))


def verdict(success: bool, reason: str = "the screen shows it", **more: Any) -> str:
    """A well-formed answer."""
    return json.dumps({"reason": reason, "success": success, **more})


@asynccontextmanager
async def serve_judge(endpoint: JudgeEndpoint) -> AsyncGenerator[str]:
    """Serve the endpoint on a free port; yields its base URL."""
    async with serve_app(endpoint.app(), "127.0.0.1", 0, grace_s=0) as url:
        yield f"{url}/v1"


def _read(number: int, body: Mapping[str, Any]) -> Asked:
    system, user = body["messages"]
    texts = [part["text"] for part in user["content"] if part["type"] == "text"]
    images = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
    return Asked(number=number, prompt=system["content"], record=json.loads(texts[0]), images=tuple(images), body=body)


def _completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {**usage, "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS},
    }
