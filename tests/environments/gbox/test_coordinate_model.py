"""What GBox's coordinate model answers, understood; and what cannot be understood, a fault."""

import json
from typing import Any

import httpx
import pytest
from gbox_sdk import AsyncGboxClient

from cua_rl.environments.gbox.coordinate_model import GboxCoordinateModel
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceServiceError

SEEN = EncodedImage(data=b"screen", format="png", width_px=100, height_px=200)


def answering(answer: dict[str, Any], asked: list[Any] | None = None) -> GboxCoordinateModel:
    def handle(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(json.loads(request.content))
        return httpx.Response(200, json=answer)

    http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    client = AsyncGboxClient(api_key="k", base_url="http://gbox/api/v1/", http_client=http)
    return GboxCoordinateModel(client)


async def test_coordinates_come_inside_the_response_or_beside_it() -> None:
    asked: list[Any] = []

    assert await answering({"response": {"coordinates": {"x": 3, "y": 4}}}, asked).find(SEEN, "Save") == (3, 4)
    assert await answering({"coordinates": {"x": 3.6, "y": 4}}).find(SEEN, "Save") == (4, 4)

    assert asked[0]["action"] == {"type": "click", "target": "Save"}
    assert asked[0]["screenshot"] == "data:image/png;base64,c2NyZWVu"


async def test_drags_are_one_question_with_target_and_destination() -> None:
    both = {"response": {"coordinates": {"target": {"x": 1, "y": 2}, "destination": {"x": 3, "y": 4}}}}
    half = {"response": {"coordinates": {"target": {"x": 1, "y": 2}, "destination": {"x": -1, "y": -1}}}}

    assert await answering(both).find_drag(SEEN, "a", "b") == ((1, 2), (3, 4))
    assert await answering(half).find_drag(SEEN, "a", "b") is None


async def test_scrolling_asks_how_the_content_moves_and_takes_the_distance() -> None:
    asked: list[Any] = []
    answer = {"response": {"coordinates": {"x": 1, "y": 2, "scrollX": 0, "scrollY": -90}}}

    assert await answering(answer, asked).find_scroll(SEEN, "list", "down") == ((1, 2), 90)

    # to see what is below, the content moves up
    assert asked[0]["action"] == {"type": "scroll", "location": "list", "direction": "up"}


@pytest.mark.parametrize("answer", [{}, {"response": {"coordinates": [1, 2]}}, {"coordinates": {"x": "3", "y": 4}}])
async def test_what_is_no_coordinates_is_a_fault_of_the_service(answer: dict[str, Any]) -> None:
    with pytest.raises(DeviceServiceError):
        await answering(answer).find(SEEN, "Save")
