"""A model server that speaks vLLM's protocol and says what it is told; runs in this process or as one of its own."""

import asyncio
import os
import sys
from base64 import b64decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cua_rl.renderers.images import image_size, num_image_tokens
from cua_rl.renderers.openai_items import conversation_from_chat, conversation_from_responses
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.vllm_access import RequireKey

LOGPROB = -0.5


@dataclass
class FakeVllm:
    """Answers Responses requests with `answers`, then with `default_answer`; keeps what it was asked."""

    renderer: Qwen3VLRenderer
    default_answer: str = "done"
    refusal: tuple[int, str] | None = None
    """Status and message of every answer."""
    answers: deque[str] = field(default_factory=deque)
    failures: deque[int] = field(default_factory=deque)
    """Statuses of the next answers."""
    load_failures: deque[int] = field(default_factory=deque)
    unload_failures: deque[int] = field(default_factory=deque)
    """The same, for adapters."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    unload_gate: asyncio.Event | None = None
    """Unloading an adapter waits for it."""
    changes: list[str] = field(default_factory=list)
    """Adapters that were loaded, and those whose unloading began and ended."""
    unloaded: list[str] = field(default_factory=list)
    extra_prompt_token: int | None = None
    """Put in front of the prompt ids it reports, so that they differ from the renderer's."""
    gate: asyncio.Event | None = None
    """Answers wait for it."""
    has_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    can_update_adapters: bool = True
    version: str = "0.32.0"
    max_model_len: int = 2000
    max_images: int = 999
    """Most images of one prompt."""
    is_healthy: bool = True
    applies_adapters: bool = True
    base_logprob: float = -2.0
    """Of each token of a canary under the base model; other weights have another one."""
    drops_requests: bool = False
    """Connections end without an answer."""
    num_canaries: int = 0
    num_answers: int = 0
    """Requests that were sampled, without those that were refused."""
    images: dict[str, str] = field(default_factory=dict)
    """URLs of the images that it has processed, by the names that requests gave them."""
    keeps_images: bool = True
    """False as with `--mm-processor-cache-gb 0`."""
    leaves_out_text: bool = False
    """As vLLM does if no text comes from the tokens: no text, no log-probabilities."""
    max_num_seqs: int = 128
    sampled_logprob: float = LOGPROB
    prompt_logprob: float = -2.0
    """Of each token of a prompt that is sent as tokens."""
    dies_once_at: Path | None = None
    """The process ends in the middle of a request if this file is not there; it makes the file first."""

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        if self.can_update_adapters:
            routes.append(Route("/v1/load_lora_adapter", self._load, methods=["POST"]))
            routes.append(Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]))
            return Starlette(routes=routes)
        return Starlette(routes=routes, exception_handlers={404: _not_found})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_healthy else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.version})

    async def _models(self, request: Request) -> Response:
        card = {"id": "base", "parent": None, "max_model_len": self.max_model_len}
        adapters = [{"id": name, "parent": "base", "max_model_len": None} for name in self.adapters]
        return JSONResponse({"data": [*adapters, card]})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        self.changes.append(f"load {body['lora_name']}")
        if self.load_failures:
            return _refusal(self.load_failures.popleft(), "out of order")
        if body["lora_name"] in self.adapters:
            return _refusal(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        if "missing" in body["lora_path"]:
            return _refusal(404, f"No adapter found for '{body['lora_path']}'")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.changes.append(f"unload {name}")
        if self.unload_gate is not None:
            await self.unload_gate.wait()
        self.changes.append(f"unloaded {name}")
        if self.unload_failures:
            return _refusal(self.unload_failures.popleft(), "out of order")
        if name not in self.adapters:
            return _refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        self.unloaded.append(name)
        return PlainTextResponse("Success")

    async def _responses(self, request: Request) -> Response:
        body = await request.json()
        refused = await self._received(body)
        if refused is not None:
            return refused
        try:
            body = body | {"input": self._with_images(body["input"])}
        except KeyError:
            return self._without_image()
        self.num_answers += 1
        return JSONResponse(self._answer(body, self.answers.popleft() if self.answers else self.default_answer))

    async def _generate(self, request: Request) -> Response:
        """One answer per sample; every token of the prompt is the second most likely one, after token 0."""
        body = await request.json()
        refused = await self._received(body)
        if refused is not None:
            return refused
        params = body["sampling_params"]
        if params["n"] > self.max_num_seqs:
            return _refusal(400, f"sampling_params.n must be at most the server's max_num_seqs ({self.max_num_seqs}).")
        if params["n"] > 1 and params["temperature"] == 0.0:
            return _refusal(400, f"n must be 1 when using greedy sampling, got {params['n']}.")
        try:
            parts = self._with_images(body.get("content_parts", []))
        except KeyError:
            return self._without_image()
        images = iter([self._length(part["url"]) for part in parts])
        prompt, places = list[int](), list[dict[str, int]]()
        for token in body["token_ids"]:
            if token == self.renderer.image_token_id:
                places.append({"offset": len(prompt), "length": next(images)})
                prompt += [token] * places[-1]["length"]
            else:
                prompt.append(token)
        if self.extra_prompt_token is not None:
            prompt = [self.extra_prompt_token, *prompt]
        entries = None
        if "prompt_logprobs" in params:
            top = {"0": {"logprob": -0.25, "rank": 1}} if params["prompt_logprobs"] else {}
            entries = [None, *(top | {str(one): {"logprob": self.prompt_logprob, "rank": 2}} for one in prompt[1:])]
        self.num_answers += params["n"]
        return JSONResponse(
            {
                "choices": [self._sample(index, params) for index in range(params["n"])],
                "prompt_logprobs": entries,
                "prompt_token_ids": prompt,
                "mm_placeholders": {"image": places} if places else None,
            }
        )

    def _sample(self, index: int, params: dict[str, Any]) -> dict[str, Any]:
        text = self.answers.popleft() if self.answers else self.default_answer
        whole = [*self.renderer.encode(text), self.renderer.stop_token_ids[0]]
        ends = (at for at, token in enumerate(whole, 1) if token in params["stop_token_ids"])
        end = next(ends, len(whole))
        tokens = whole[: min(end, params.get("max_tokens", end))]
        entries = [{"token_id": one, "logprob": self.sampled_logprob, "rank": 1} for one in tokens]
        return {
            "index": index,
            "finish_reason": "stop" if len(tokens) == end else "length",
            "token_ids": tokens,
            "logprobs": {"content": [entry | {"top_logprobs": [entry]} for entry in entries]},
        }

    def _length(self, url: str) -> int:
        assert self.renderer.image_settings is not None
        return num_image_tokens(*image_size(b64decode(url.partition(",")[2])), self.renderer.image_settings)

    async def _received(self, body: dict[str, Any]) -> Response | None:
        """What it says before it looks at a prompt."""
        self.requests.append(body)
        self.has_arrived.set()
        if self.dies_once_at is not None and not self.dies_once_at.exists():
            self.dies_once_at.touch()
            os._exit(9)
        if self.drops_requests:
            return _Hangup()
        if self.gate is not None:
            await self.gate.wait()
        if self.failures and (status := self.failures.popleft()) != 200:
            return _refusal(status, "out of order")
        if self.refusal is not None:
            return _refusal(*self.refusal)
        if body["model"] != "base" and body["model"] not in self.adapters:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        if not self.keeps_images:
            self.images.clear()
        return None

    def _without_image(self) -> Response:
        lost = "Cache miss for image at index 0 but data is not provided."
        return _refusal(
            400, lost if self.keeps_images else "Failed to apply Qwen3VLProcessor on data={'images': [None]}"
        )

    def _with_images(self, content: Any) -> Any:
        """The input with the data of named images; raises `KeyError` for one that it does not have."""
        if isinstance(content, list):
            return [self._with_images(part) for part in content]
        if not isinstance(content, dict):
            return content
        name = {"input_image": "image_url", "image_url": "url"}.get(content.get("type", ""))
        if name is None:
            return {key: self._with_images(value) for key, value in content.items()}
        if content[name] is not None:
            self.images[content["uuid"]] = content[name]
        return content | {name: self.images[content["uuid"]]}

    def _answer(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        conversation = conversation_from_responses(body)
        prompt = self.renderer.render(conversation.items, conversation.tools).token_ids(self.renderer.image_token_id)
        if self.extra_prompt_token is not None:
            prompt = [self.extra_prompt_token, *prompt]
        ends = [place + len(stop) for stop in body.get("stop", []) if (place := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        whole = [*self.renderer.encode(text), *([] if ends else self.renderer.stop_token_ids[:1])]
        sampled = whole[: body["max_output_tokens"]]
        part = {"type": "output_text", "text": text, "logprobs": [{"logprob": LOGPROB} for _ in sampled]}
        return {
            "id": "resp_server",
            "status": "completed" if sampled == whole else "incomplete",
            "output": [{"type": "message", "content": [] if self.leaves_out_text else [part]}],
            "input_messages": [{"tokens": prompt}],
            "output_messages": [{"tokens": sampled}],
            "usage": {"input_tokens_details": {"cached_tokens": 3}},
        }

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        parts = body["messages"][0]["content"]
        if sum(part["type"] == "image_url" for part in parts) > self.max_images:
            return _refusal(400, f"At most {self.max_images} image(s) may be provided in one prompt.")
        prompt = self.renderer.render(conversation_from_chat(body).items, ())
        tokens = prompt.token_ids(self.renderer.image_token_id)
        return JSONResponse({"count": len(tokens), "tokens": tokens, "max_model_len": self.max_model_len})

    async def _completions(self, request: Request) -> Response:
        """Adapters add 0.25 to each log-probability, except inert ones, whose keys match nothing."""
        body = await request.json()
        self.num_canaries += 1
        path = self.adapters.get(body["model"], "inert") if self.applies_adapters else "inert"
        logprob = self.base_logprob + (0.0 if "inert" in path else 0.25)
        entries: Sequence[Any] = [None, *({str(token): {"logprob": logprob}} for token in body["prompt"][1:])]
        return JSONResponse({"choices": [{"prompt_logprobs": entries}]})


class _Hangup(Response):
    """Promises a body and ends the connection instead."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        raise ConnectionAbortedError


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


async def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "Not Found"}, 404)


def fake_command(model_folder: Path, dies_once_at: Path | None = None) -> Any:
    """For `VllmServer(make_command=...)`: the fake as a process of its own."""

    def command(config: ServerConfig, address: str) -> list[str]:
        place, mark = address.rpartition(":")[2], str(dies_once_at or "")
        return [sys.executable, "-m", "tests.sampling.fake_vllm", str(model_folder), place, mark]

    return command


if __name__ == "__main__":
    folder, place, mark = sys.argv[1:]
    fake = FakeVllm(load_qwen3_vl(Path(folder)), dies_once_at=Path(mark) if mark else None)
    listens = {"uds": place} if "/" in place else {"port": int(place)}
    uvicorn.run(RequireKey(fake.app()), **listens, log_level="warning")
