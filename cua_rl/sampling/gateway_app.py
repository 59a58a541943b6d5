"""The gateway's HTTP surface: `/rollouts/<rollout_id>/v1/` with responses, chat/completions and models; for agents in
other processes also `/rollouts/<rollout_id>/device` (`gateway_devices.py`).
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cua_rl.agent.gbox_agent import CONFIGURATION
from cua_rl.agent.rollout_watch import RolloutOver
from cua_rl.errors import ConfigError, SamplingError
from cua_rl.renderers.request_error import RequestError
from cua_rl.sampling.client import RequestRejected
from cua_rl.sampling.openai_answers import Answer, chat_completion, chat_events, response_events, response_object
from cua_rl.types import ModelTurn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)


class UnknownRollout(LookupError):
    """No rollout with this id is open."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"expected the id of an open rollout, got {rollout_id!r}; open it first, or it has ended")


class ContextOverflow(Exception):
    """Prompt and answer together exceed the model's context."""


class Answerer(Protocol):
    """Answers the requests of rollouts: the gateway, or an endpoint that is evaluated."""

    async def answer(
        self, rollout_id: str, request: Mapping[str, Any], api: Literal["responses", "chat"]
    ) -> Answer: ...

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...


def make_gateway_app(gateway: Answerer, model_name: str, more_routes: Sequence[Route] = ()) -> Starlette:
    """The ASGI app of a gateway."""

    async def responses(request: Request) -> Response:
        body = await _body(request)
        answer = await gateway.answer(request.path_params["rollout_id"], body, "responses")
        response = response_object(answer, body)
        return stream(response_events(response)) if body.get("stream") else JSONResponse(response)

    async def chat(request: Request) -> Response:
        body = await _body(request)
        answer = await gateway.answer(request.path_params["rollout_id"], body, "chat")
        if not body.get("stream"):
            return JSONResponse(chat_completion(answer))
        options = body.get("stream_options")
        with_usage = isinstance(options, Mapping) and bool(cast("Mapping[str, object]", options).get("include_usage"))
        return stream(chat_events(answer, with_usage=with_usage))

    def stream(events: Iterator[bytes]) -> StreamingResponse:
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def models(request: Request) -> Response:
        gateway.turns(request.path_params["rollout_id"])  # refuses unknown rollouts
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        gateway.turns(request.path_params["rollout_id"])
        return JSONResponse(card)

    card = {"id": model_name, "object": "model", "created": 0, "owned_by": "cua_rl"}
    base = "/rollouts/{rollout_id}/v1"
    return Starlette(
        routes=[
            Route(f"{base}/responses", _guarded(responses), methods=["POST"]),
            Route(f"{base}/chat/completions", _guarded(chat), methods=["POST"]),
            Route(f"{base}/models", _guarded(models), methods=["GET"]),
            Route(f"{base}/models/{{name}}", _guarded(model), methods=["GET"]),
            *more_routes,
        ]
    )


Endpoint = Callable[[Request], Awaitable[Response]]


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Answer errors in OpenAI's format."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except UnknownRollout as error:
            return _error(404, str(error), "invalid_request_error", "rollout_not_found")
        except RolloutOver as error:
            return _error(403, str(error), "invalid_request_error", error.code)
        except ContextOverflow as error:
            return _error(400, str(error), "invalid_request_error", "context_length_exceeded")
        except RequestError as error:
            return _error(400, str(error), "invalid_request_error", "invalid_request")
        except ConfigError as error:
            return _error(400, str(error), "invalid_request_error", CONFIGURATION)
        except RequestRejected as error:
            return _error(error.status, error.message, "invalid_request_error", "rejected_by_model_server")
        except SamplingError as error:
            logger.error("sampling failed path=%s %s", request.url.path, error)
            return _error(503, str(error), "server_error", "sampling_failed")

    return guarded


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise RequestError(expected="a JSON body", got=str(error), do="send JSON") from error
    if not isinstance(body, dict):
        raise RequestError(expected="a JSON object", got=type(body).__name__, do="send an OpenAI request")
    return cast("dict[str, Any]", body)


def _error(status: int, message: str, kind: str, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def in_process_client(app: Starlette, rollout_id: str) -> "AsyncOpenAI":
    """An OpenAI client for a rollout in this process: no socket, and no retries in addition to the gateway's."""
    from openai import AsyncOpenAI

    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False, timeout=None)
    return AsyncOpenAI(
        base_url=f"http://gateway/rollouts/{rollout_id}/v1",
        api_key="not-needed",
        max_retries=0,
        timeout=None,
        http_client=cast("Any", http_client),  # openai 3 is written against httpx2, but takes httpx too
    )
