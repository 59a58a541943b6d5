"""The gateway's HTTP surface: `/rollouts/<rollout_id>/v1/` with responses, chat/completions, messages and models; for
agents in other processes also `/rollouts/<rollout_id>/device` (`gateway_devices.py`).

Every request carries the key of its rollout, as `Authorization: Bearer`, as `X-Api-Key` or, for agents without a
setting for a key, in the path: `/rollouts/<rollout_id>/keys/<key>/v1/`. The key is checked before the body is read.
"""

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cua_rl.agent.rollout_watch import RolloutOver
from cua_rl.host.masking import make_key
from cua_rl.host.request_limits import BodyBudget, RequestRefused, bearer_key, host_name, read_json, require_json
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.request_error import ContextOverflow, RequestError
from cua_rl.sampling.computer_tool import ComputerTool
from cua_rl.sampling.ignored_fields import Api
from cua_rl.sampling.messages_api import message_events, message_object
from cua_rl.sampling.openai_answers import Answer, chat_completion, chat_events, response_events, response_object
from cua_rl.sampling.replica import RequestRejected
from cua_rl.types.errors import ConfigError, SamplingError
from cua_rl.types.json_values import JsonDict, is_object, mapping

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

IN_PROCESS_HOST = "gateway"
MAX_BODY_BYTES = 256 * 2**20
"""Limit for all open requests of a rollout together; each contains all screenshots of its conversation."""


class UnknownRollout(LookupError):
    """No rollout with this id is open."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"expected the id of an open rollout, got {rollout_id!r}; open it first, or it has ended")


@dataclass(slots=True)
class RolloutAccess:
    """The key of an open rollout, its images, and the budget for the bodies of its requests."""

    api_key: str = field(default_factory=make_key, repr=False)
    images: ImageUrls = field(default_factory=ImageUrls)
    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(MAX_BODY_BYTES))


_NO_ACCESS = RolloutAccess()  # compared with if no rollout is open, so that both refusals take equally long


class Answerer(Protocol):
    """Answers the requests of rollouts: the gateway."""

    async def answer(
        self, rollout_id: str, request: Mapping[str, Any], api: Api, *, is_trained: bool = True
    ) -> Answer: ...

    def access(self, rollout_id: str) -> RolloutAccess | None: ...


def make_gateway_app(
    gateway: Answerer, model_name: str, more_routes: Sequence[Route] = (), *, hosts: Container[str] = (IN_PROCESS_HOST,)
) -> Starlette:
    """The ASGI app of a gateway; requests must name one of `hosts`, or the address it listens on, as their host."""

    async def responses(request: Request, body: Mapping[str, Any]) -> Response:
        rollout_id, is_trained = request.path_params["rollout_id"], _is_trained(request)
        answer = await gateway.answer(rollout_id, body, "responses", is_trained=is_trained)
        response = response_object(answer, body)
        if (computer := ComputerTool.find(body)) is not None:
            response["output"] = computer.write(response["output"])
        return _reply(answer, response_events(response) if body.get("stream") else response)

    async def chat(request: Request, body: Mapping[str, Any]) -> Response:
        rollout_id, is_trained = request.path_params["rollout_id"], _is_trained(request)
        answer = await gateway.answer(rollout_id, body, "chat", is_trained=is_trained)
        if not body.get("stream"):
            return _reply(answer, chat_completion(answer))
        with_usage = bool(mapping(body.get("stream_options")).get("include_usage"))
        return _reply(answer, chat_events(answer, with_usage=with_usage))

    async def messages(request: Request, body: Mapping[str, Any]) -> Response:
        rollout_id, is_trained = request.path_params["rollout_id"], _is_trained(request)
        answer = await gateway.answer(rollout_id, body, "messages", is_trained=is_trained)
        message = message_object(answer, body)
        return _reply(answer, message_events(message) if body.get("stream") else message)

    async def models(request: Request, body: Mapping[str, Any]) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request, body: Mapping[str, Any]) -> Response:
        return JSONResponse(card)

    async def unknown(request: Request, _: Exception) -> Response:
        known = ", ".join(path for path, *_ in endpoints)
        message = f"expected v1/ and one of {known}, got an address that ends with {request.url.path.split('/')[-1]!r}"
        return _error(404, message, "invalid_request_error", "unknown_url")

    card = {"id": model_name, "object": "model", "created": 0, "owned_by": "cua_rl"}
    endpoints = (
        ("responses", responses, "POST"),
        ("chat/completions", chat, "POST"),
        ("messages", messages, "POST"),
        ("models", models, "GET"),
        ("models/{name}", model, "GET"),
    )
    return Starlette(
        routes=[
            *(
                Route(f"/rollouts/{{rollout_id}}{key}/v1/{path}", _guarded(gateway, endpoint, hosts), methods=[method])
                for key in ("", "/keys/{api_key}")
                for path, endpoint, method in endpoints
            ),
            *more_routes,
        ],
        exception_handlers={404: unknown},
    )


_Endpoint = Callable[[Request, Mapping[str, Any]], Awaitable[Response]]


async def _admit(request: Request, gateway: Answerer, endpoint: _Endpoint, hosts: Container[str]) -> Response:
    """Check the key before the body is read, then call the endpoint."""
    require_host(request, hosts)
    key = request.path_params.get("api_key") or bearer_key(request) or request.headers.get("x-api-key", "")
    access = gateway.access(request.path_params["rollout_id"])
    is_right = hmac.compare_digest(key.encode(), (access or _NO_ACCESS).api_key.encode())
    if access is None or not is_right:
        raise RequestRefused(
            401, "expected the key of an open rollout, got none or another one; send the rollout's OPENAI_API_KEY"
        )
    if request.method != "POST":
        return await endpoint(request, {})
    require_json(request)
    with access.bodies.hold() as held:
        body = await read_json(request, held, access.images.with_names)
        if not is_object(body):
            raise RequestError(expected="a JSON object", got=type(body).__name__, do="send an OpenAI request")
        _require_text(body)
        return await endpoint(request, body)


def _reply(answer: Answer, body: JsonDict | Iterator[bytes]) -> Response:
    headers = {"CUA-Ignored": ", ".join(answer.ignored)} if answer.ignored else {}
    if isinstance(body, dict):
        return JSONResponse(body, headers=headers)
    return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})


def _is_trained(request: Request) -> bool:
    """Whether the answer is a turn; a program can exclude a probe or a repeated request by `CUA-Train: no`."""
    said = request.headers.get("CUA-Train", "yes").strip().lower()
    if said not in ("yes", "no"):
        raise RequestError(expected="'yes' or 'no' in the header CUA-Train", got=repr(said), do="correct the header")
    return said == "yes"


_WRITTEN_AGAIN = (
    *("instructions", "metadata", "temperature", "top_p", "tools", "tool_choice"),
    *("text", "response_format", "output_config", "output_format", "stop", "stop_sequences"),
)
"""Fields that a Response repeats, or that the model server gets."""


def _require_text(body: Mapping[str, Any]) -> None:
    """Raise `RequestError` for fields that are written again but cannot be written as JSON, such as NaN."""
    echoed = {name: body.get(name) for name in _WRITTEN_AGAIN}
    try:
        json.dumps(echoed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise RequestError(
            expected="finite numbers and valid Unicode", got=str(error), do="correct the request"
        ) from None


def _guarded(gateway: Answerer, endpoint: _Endpoint, hosts: Container[str]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint with errors answered in OpenAI's format."""

    async def guarded(request: Request) -> Response:
        try:
            return await _admit(request, gateway, endpoint, hosts)
        except RequestRefused as error:
            code = "invalid_api_key" if error.status == HTTPStatus.UNAUTHORIZED else "invalid_request"
            return _error(error.status, error.message, "invalid_request_error", code)
        except UnknownRollout as error:
            return _error(404, str(error), "invalid_request_error", "rollout_not_found")
        except RolloutOver as error:
            return _error(403, str(error), "invalid_request_error", error.code)
        except ContextOverflow as error:
            return _error(400, str(error), "invalid_request_error", "context_length_exceeded")
        except RequestError as error:
            return _error(400, str(error), "invalid_request_error", "invalid_request")
        except ConfigError as error:
            return _error(400, str(error), "invalid_request_error", "configuration")
        except RequestRejected as error:
            return _error(error.status, error.message, "invalid_request_error", "rejected_by_model_server")
        except SamplingError as error:
            logger.error("sampling failed rollout_id=%s %s", request.path_params["rollout_id"], error)
            return _error(503, str(error), "server_error", "sampling_failed")

    return guarded


def require_host(request: Request, hosts: Container[str]) -> None:
    """Raise `RequestRefused` for a foreign Host header, as in DNS rebinding by a web page."""
    name, server = host_name(request.headers.get("host", "")), request.scope.get("server")
    if name not in hosts and name != "localhost" and not (server and name == server[0]):
        raise RequestRefused(
            421,
            f"expected the gateway's own host, got {name[:100]!r}; use the address given, or set gateway.public_url",
        )


def _error(status: int, message: str, kind: str, code: str) -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"type": "error", "error": error}, status)  # the outer type is for Anthropic's clients


def in_process_client(app: Starlette, rollout_id: str, api_key: str) -> "AsyncOpenAI":
    """An OpenAI client for a rollout in this process, without a socket; only the gateway retries."""
    from openai import AsyncOpenAI

    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False, timeout=None)
    return AsyncOpenAI(
        base_url=f"http://{IN_PROCESS_HOST}/rollouts/{rollout_id}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=None,
        http_client=cast("Any", http_client),  # openai 3 is written against httpx2, but takes httpx too
    )
