"""The device of a rollout over HTTP, for agents in any language: `/rollouts/<rollout_id>/device`.

    GET  .../device             what to do and how: instruction, size of the screen, prompt and tool for the model
    GET  .../device/screenshot  a PNG, its size in X-Screen-Width and X-Screen-Height; ?as=url gives JSON, as actions do
    POST .../device/action      the arguments of a tool call as JSON, coordinates from 0 to 1000

Every request carries `Authorization: Bearer <CUA_DEVICE_TOKEN>`.
"""

import logging
from collections.abc import Awaitable, Callable, Container

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutOver
from cua_rl.host.request_limits import BodyBudget, RequestRefused, bearer_key, read_json, require_json
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.sampling.gateway_app import UnknownRollout, require_host
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError
from cua_rl.types.json_values import is_object

logger = logging.getLogger(__name__)


_MAX_ACTION_BYTES = 256 * 2**10

FindDevice = Callable[[str, str], OfferedDevice | None]
"""From a rollout's id and a token to the device that the token gives access to."""


def device_routes(find: FindDevice, image_urls: Callable[[str], ImageUrls], hosts: Container[str]) -> list[Route]:
    """The routes to the devices of open rollouts; `image_urls` makes the URLs of their screenshots."""

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
        require_json(request)
        with BodyBudget(_MAX_ACTION_BYTES).hold() as held:
            arguments = await read_json(request, held)
        if not is_object(arguments):
            raise RequestRefused(400, 'expected a JSON object such as {"action": "click", "coordinate": [500, 500]}')
        reply = await device.act(arguments)
        answer = {"done": reply.error is None, "error": reply.error, "finished": reply.is_finished}
        return JSONResponse(answer | {"screenshot": fields(request, reply.screen)})

    base = "/rollouts/{rollout_id}/device"
    return [
        Route(base, _guarded(find, describe, hosts), methods=["GET"]),
        Route(f"{base}/screenshot", _guarded(find, screenshot, hosts), methods=["GET"]),
        Route(f"{base}/action", _guarded(find, action, hosts), methods=["POST"]),
    ]


_Endpoint = Callable[[OfferedDevice, Request], Awaitable[Response]]


def _guarded(find: FindDevice, endpoint: _Endpoint, hosts: Container[str]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint with the device of the token; errors become status codes."""

    async def guarded(request: Request) -> Response:
        try:
            require_host(request, hosts)
            device = find(request.path_params["rollout_id"], bearer_key(request))
            if device is None:
                raise RequestRefused(401, "expected the bearer token of an open rollout; send CUA_DEVICE_TOKEN")
            return await endpoint(device, request)
        except RequestRefused as error:
            return _refusal(error.status, error.message)
        except (RolloutOver, UnknownRollout) as error:
            return _refusal(409, str(error))
        except DeviceError as error:
            logger.error("device failed path=%s %s", request.url.path, error)
            return _refusal(503, f"the device failed: {error}")

    return guarded


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
