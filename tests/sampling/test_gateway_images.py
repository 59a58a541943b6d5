"""Screenshots that agents send as links."""

import gzip
import struct
import zlib
from base64 import b64encode
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.images import MAX_PIXELS, image_size
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.renderers.request_error import RequestError
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_images import ImageFetcher
from cua_rl.types.rollout import SamplingParams
from tests.builders import stored_image
from tests.renderers.generated import encode_image, make_image

SCREEN = encode_image(make_image(64, 96))


async def test_linked_screenshots_are_fetched_once_from_allowed_hosts_and_stored(
    client: SamplingClient, renderer: Qwen3VLRenderer
) -> None:
    asked: list[str] = []

    async def store(request: Request) -> Response:
        asked.append(request.path_params["name"])
        if asked[-1] == "moved":
            return RedirectResponse("/a.png")
        return Response(SCREEN) if asked[-1] == "a.png" else Response(status_code=403)

    gateway = Gateway(
        client, renderer, SamplingParams(max_tokens=8, temperature=1.0), images=ImageFetcher(["127.0.0.1"])
    )
    async with serve_app(Starlette(routes=[Route("/{name}", store)]), "127.0.0.1", 0, grace_s=0) as url:
        gateway.open_rollout("r")
        agent = gateway.openai_client("r")

        async def ask(link: str) -> None:
            part: Any = {"type": "image_url", "image_url": {"url": link}}
            await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part]}])

        await ask(f"{url}/a.png")
        await ask(f"{url}/a.png")
        await ask(f"data:image/png;base64,{b64encode(SCREEN).decode()}")
        refusals: list[str] = []
        for link in (f"{url}/expired?signature=secret", f"{url}/moved", "http://metadata.internal/x"):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(link)
            refusals.append(caught.value.message)

    turns = gateway.close_rollout("r")
    assert asked == ["a.png", "expired", "moved"]
    assert [turn.prompt.images[0].data for turn in turns] == [SCREEN] * 3
    assert "signature" not in refusals[0]
    assert "allowed_media_domains" in refusals[2]


async def test_a_rollout_keeps_a_limited_amount_of_images(client: SamplingClient, renderer: Qwen3VLRenderer) -> None:
    gateway = Gateway(client, renderer, SamplingParams(max_tokens=8, temperature=1.0), max_image_characters=1000)
    gateway.open_rollout("r")
    agent = gateway.openai_client("r")
    screens = [encode_image(make_image(64, 96, seed)) for seed in range(20)]

    for screen in screens:
        link = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(screen).decode()}"}}
        message: Any = {"role": "user", "content": [link]}
        await agent.chat.completions.create(model="policy", messages=[message])

    most = 1000 + max(4 * len(screen) // 3 + 100 for screen in screens)
    assert gateway.image_urls("r").num_characters < most
    assert [turn.prompt.images[0].data for turn in gateway.close_rollout("r")] == screens


async def test_an_agent_in_this_process_names_its_screenshots_however_many_were_forgotten(
    client: SamplingClient, renderer: Qwen3VLRenderer
) -> None:
    gateway = Gateway(client, renderer, SamplingParams(max_tokens=8, temperature=1.0), max_image_characters=1)
    gateway.open_rollout("r")
    agent, url_of = gateway.openai_client("r"), gateway.image_url_of("r")
    screens = [stored_image(encode_image(make_image(64, 96, seed))) for seed in range(2)]
    names: Any = [{"type": "input_image", "image_url": url_of(screen), "detail": "auto"} for screen in screens]

    for _ in range(2):  # what the first request was read to is forgotten before the second
        await agent.responses.create(model="policy", input=[{"role": "user", "content": names}])

    for turn in gateway.close_rollout("r"):
        assert all(image is screen for image, screen in zip(turn.prompt.images, screens, strict=True))


@pytest.mark.parametrize("link", ["http://[::1/a.png", "http://127.0.0.1:x/a.png", "http://127.0.0.1/\x01"])
async def test_a_link_that_is_no_address_is_refused(link: str) -> None:
    with pytest.raises(RequestError, match="expected an image"):
        await ImageFetcher(["127.0.0.1"]).inline({"input": [{"type": "input_image", "image_url": link}]})


async def test_an_image_that_was_compressed_once_more_is_refused_without_being_inflated() -> None:
    bomb = gzip.compress(gzip.compress(SCREEN + bytes(200 * 2**20)))  # 200 MiB in less than 1 KiB
    assert len(bomb) < 2000
    asked: list[str] = []

    async def store(request: Request) -> Response:
        asked.append(request.headers["accept-encoding"])
        return Response(bomb, headers={"Content-Encoding": "gzip, gzip"})

    async with serve_app(Starlette(routes=[Route("/bomb.png", store)]), "127.0.0.1", 0, grace_s=0) as url:
        part = {"type": "input_image", "image_url": f"{url}/bomb.png"}
        with pytest.raises(RequestError, match="no such image, or one too large"):
            await ImageFetcher(["127.0.0.1"]).inline({"input": [part]})
    assert asked == ["identity"]


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    def png(width_px: int, height_px: int) -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = chunk(b"IHDR", struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0))
        # Pillow decodes the pixels to look for an orientation after them
        pixels = chunk(b"IDAT", zlib.compress(bytes(2**20)))
        return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"eXIf", b"MM") + chunk(b"IEND", b"")

    with pytest.raises(RequestError, match=f"more than {MAX_PIXELS}"):
        image_size(png(8001, 5000))
    with pytest.raises(RequestError, match="truncated"):  # within the limit, it is decoded
        image_size(png(800, 5000))
