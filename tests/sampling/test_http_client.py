import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from cua_rl.sampling.http_client import HttpClient, HttpReply, encode_body
from tests.builders import stored_image
from tests.renderers.generated import encode_image, make_image


@asynccontextmanager
async def serving(handler: object) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        await web.SockSite(runner, taken).start()
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}/prefix/"
        finally:
            await runner.cleanup()


async def test_paths_are_added_to_the_address_and_bodies_are_json() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "body": await request.json()})

    async with serving(echo) as url:
        client = HttpClient(url, timeout_s=10)
        reply = await client.post("/v1/responses", {"model": "policy"})
        await client.close()

    assert reply.is_success
    assert reply.json == {"path": "/prefix/v1/responses", "body": {"model": "policy"}}


def test_images_are_encoded_as_if_their_urls_had_stood_there_whatever_the_texts_are() -> None:
    png, jpeg = (stored_image(encode_image(make_image(64, 96), kind)) for kind in ("png", "jpeg"))
    texts = ["data:image/png;base64,", 'é\ud800\x00"', png.sha256, "EncodedImage"]
    shown = (png, None, jpeg, png)
    parts = [{"image_url": image, "uuid": number} for number, image in enumerate(shown)]
    urls = [{"image_url": image and image.data_url(), "uuid": number} for number, image in enumerate(shown)]

    assert encode_body({"input": [*parts, texts], "n": 1.5}) == json.dumps({"input": [*urls, texts], "n": 1.5}).encode()
    with pytest.raises(TypeError, match="expected a JSON value or an image, got set"):
        encode_body({"input": set[str]()})


async def test_a_server_that_hangs_up_is_a_connection_error() -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(hang_up) as url:
        client = HttpClient(url, timeout_s=10)
        with pytest.raises(ConnectionError, match="Disconnected"):
            await client.post("/x", {})
        await client.close()


async def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(TimeoutError):
            await client.post("/x", {})
        await client.close()


@pytest.mark.parametrize(
    ("content_type", "text", "message"),
    [
        ("application/json", '{"error": {"message": "too long"}}', "too long"),
        ("application/json", '{"detail": "Not Found"}', "Not Found"),
        ("application/json", '["a list"]', '["a list"]'),
        ("application/json", "{broken", "{broken"),
        ("text/plain", "Internal Server Error", "Internal Server Error"),
    ],
)
def test_the_message_of_an_error_is_found_wherever_the_server_put_it(
    content_type: str, text: str, message: str
) -> None:
    assert HttpReply(400, content_type, text).message == message
