"""The address at which rollout workers register, report and deliver; each request carries the run's worker token.

POST /workers                              Hello   -> Welcome
POST /workers/<id>/orders                  Report  -> Orders (waits for changes)
POST /workers/<id>/rollouts/<rollout_id>   Ended   -> nothing

410 means that the run does not know the worker or the rollout (any more).
"""

import asyncio
from collections.abc import Awaitable, Callable
from hmac import compare_digest

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.host.request_limits import BodyBudget, RequestRefused, bearer_key, read_body
from cua_rl.types.codec import MessageError, decode, encode
from cua_rl.workers.remote import RemoteRunner, WorkerRefused
from cua_rl.workers.worker_wire import Ended, Hello, Report

MAX_BODY_BYTES = 2 * 2**30
"""Limit for the rollouts that are being delivered at the same time, together."""

_Answer = Callable[[Request, bytes], Awaitable[object | None]]


def make_worker_app(runner: RemoteRunner, token: str) -> Starlette:
    """The app over a runner; workers authenticate with `token`."""
    budget = BodyBudget(MAX_BODY_BYTES)

    def route(path: str, answer: _Answer) -> Route:
        async def handle(request: Request) -> Response:
            try:
                if not compare_digest(bearer_key(request).encode(), token.encode()):
                    raise RequestRefused(401, "expected the token of the run's workers as Authorization: Bearer")
                with budget.hold() as held:
                    reply = await answer(request, await read_body(request, held))
            except RequestRefused as refused:
                return JSONResponse({"error": refused.message}, refused.status)
            except WorkerRefused as refused:
                return JSONResponse({"error": str(refused)}, 410)
            except MessageError as error:
                return JSONResponse({"error": str(error)}, 400)
            return Response(status_code=204) if reply is None else Response(encode(reply))

        return Route(path, handle, methods=["POST"])

    async def register(_: Request, body: bytes) -> object:
        return runner.register(decode(body, Hello))

    async def orders(request: Request, body: bytes) -> object:
        return await runner.orders(request.path_params["worker_id"], decode(body, Report))

    async def accept(request: Request, body: bytes) -> None:
        ended = await asyncio.to_thread(decode, body, Ended)
        runner.accept(request.path_params["worker_id"], request.path_params["rollout_id"], ended)

    return Starlette(
        routes=[
            route("/workers", register),
            route("/workers/{worker_id}/orders", orders),
            route("/workers/{worker_id}/rollouts/{rollout_id}", accept),
        ]
    )
