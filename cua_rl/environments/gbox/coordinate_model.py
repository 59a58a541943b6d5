"""GBox's coordinate model: the place of a described element on a screenshot, in pixels; (-1, -1) means "not there"."""

import asyncio
from collections.abc import Mapping
from typing import cast

from gbox_sdk import AsyncGboxClient

from cua_rl.environments.device import Direction, Pixel
from cua_rl.environments.gbox.service import ask
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceServiceError
from cua_rl.types.json_values import mapping

MODEL = "gbox-handy-1"
_CONTENT_MOVES: Mapping[str, str] = {"down": "up", "up": "down", "right": "left", "left": "right"}
"""The API names the direction in which the content moves; we name the side that comes into view."""


class GboxCoordinateModel:
    """Finds elements for the agent, on screenshots of any device."""

    def __init__(self, client: AsyncGboxClient) -> None:
        self._client = client

    async def find(self, seen: EncodedImage, target: str) -> Pixel | None:
        """The pixel of an element, None if it is not there; raises `DeviceError`."""
        return _pixel(await self._ask(seen, {"type": "click", "target": target}))

    async def find_drag(self, seen: EncodedImage, target: str, destination: str) -> tuple[Pixel, Pixel] | None:
        """Both ends of a drag in one question, None if one is not there; raises `DeviceError`."""
        found = await self._ask(seen, {"type": "drag", "target": target, "destination": destination})
        start, end = _pixel(_part(found, "target")), _pixel(_part(found, "destination"))
        return None if start is None or end is None else (start, end)

    async def find_scroll(self, seen: EncodedImage, target: str, direction: Direction) -> tuple[Pixel, int] | None:
        """Where to scroll and how far in pixels, None if the element is not there; raises `DeviceError`."""
        found = await self._ask(seen, {"type": "scroll", "location": target, "direction": _CONTENT_MOVES[direction]})
        at = _pixel(found)
        amount = found.get("scrollY" if direction in ("up", "down") else "scrollX", 0)
        return None if at is None else (at, abs(round(_number(amount, found))))

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, seen: EncodedImage, action: Mapping[str, str]) -> Mapping[str, object]:
        screenshot = await asyncio.to_thread(seen.data_url)
        answer = await ask(
            lambda: self._client.post(
                "/model", cast_to=object, body={"model": MODEL, "screenshot": screenshot, "action": dict(action)}
            ),
            f"find {action!r} on a screenshot",
            is_repeatable=True,
        )
        fields = mapping(answer)
        found = mapping(fields.get("response")).get("coordinates", fields.get("coordinates"))
        if not isinstance(found, dict):
            raise DeviceServiceError(f"expected coordinates from GBox's coordinate model, got {answer!r}")
        return cast("Mapping[str, object]", found)


def _part(found: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = found.get(name)
    if not isinstance(part, dict):
        raise DeviceServiceError(f"expected coordinates with {name!r} from GBox's coordinate model, got {found!r}")
    return cast("Mapping[str, object]", part)


def _pixel(found: Mapping[str, object]) -> Pixel | None:
    x, y = (round(_number(found.get(name), found)) for name in ("x", "y"))
    return None if x < 0 or y < 0 else (x, y)


def _number(value: object, found: Mapping[str, object]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeviceServiceError(f"expected numbers from GBox's coordinate model, got {dict(found)!r}")
    return float(value)
