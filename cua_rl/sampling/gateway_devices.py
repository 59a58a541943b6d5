"""The device of a rollout over HTTP, for agents in any language: `/rollouts/<rollout_id>/device`.

    GET  .../device             what to do and how: instruction, size of the screen, prompt and tool for the model
    GET  .../device/screenshot  a PNG, its size in X-Screen-Width and X-Screen-Height; ?as=url gives JSON, as actions do
    POST .../device/action      the arguments of a tool call as JSON, coordinates from 0 to 1000

Every request carries `Authorization: Bearer <CUA_DEVICE_TOKEN>`.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutOver
from cua_rl.conversation import EncodedImage
from cua_rl.errors import DeviceError
from cua_rl.renderers.image_urls import ImageUrls

logger = logging.getLogger(__name__)


FindDevice = Callable[[str, str], OfferedDevice | None]
"""From a rollout's id and a token to the device that the token gives access to."""


def device_routes(find: FindDevice, image_urls: Callable[[str], ImageUrls]) -> list[Route]:
    """The routes to the devices of open rollouts, whose screenshots are written with their `image_urls`."""

    def fields(request: Request, screen: EncodedImage) -> dict[str, object]:
        """The screen as a `data:` URL, ready for `image_url` in the next request to the model."""
        url = image_urls(request.path_params["rollout_id"]).url(screen)
        return {"url": url, "width_px": screen.width_px, "height_px": screen.height_px}

    async def describe(device: OfferedDevice, request: Request) -> Response:
        return JSONResponse(device.describe())

    async def screenshot(device: OfferedDevice, request: Request) -> Response:
        screen = await device.observe()
        if request.query_params.get("as") == "url":
            return JSONResponse(fields(request, screen))
        size = {"X-Screen-Width": str(screen.width_px), "X-Screen-Height": str(screen.height_px)}
        return Response(screen.data, media_type=f"image/{screen.format}", headers={**size, "Cache-Control": "no-store"})

    async def action(device: OfferedDevice, request: Request) -> Response:
        arguments = _arguments(await request.body())
        if arguments is None:
            return _refusal(400, 'expected a JSON object such as {"action": "click", "coordinate": [500, 500]}')
        reply = await device.act(arguments)
        answer = {"done": reply.error is None, "error": reply.error, "finished": reply.is_finished}
        return JSONResponse(answer | {"screenshot": fields(request, reply.screen)})

    base = "/rollouts/{rollout_id}/device"
    return [
        Route(base, _guarded(find, describe), methods=["GET"]),
        Route(f"{base}/screenshot", _guarded(find, screenshot), methods=["GET"]),
        Route(f"{base}/action", _guarded(find, action), methods=["POST"]),
    ]


_Endpoint = Callable[[OfferedDevice, Request], Awaitable[Response]]


def _guarded(find: FindDevice, endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Find the device that the token opens, and say with a status what went wrong."""

    async def guarded(request: Request) -> Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        device = find(request.path_params["rollout_id"], token)
        if device is None:
            return _refusal(401, "expected the bearer token of a rollout that goes on; send CUA_DEVICE_TOKEN")
        try:
            return await endpoint(device, request)
        except RolloutOver as error:
            return _refusal(409, str(error))
        except DeviceError as error:
            logger.error("device failed path=%s %s", request.url.path, error)
            return _refusal(503, f"the device failed: {error}")

    return guarded


def _arguments(body: bytes) -> Mapping[str, object] | None:
    try:
        arguments: object = json.loads(body)
    except ValueError:
        return None
    return cast("Mapping[str, object]", arguments) if isinstance(arguments, Mapping) else None


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
