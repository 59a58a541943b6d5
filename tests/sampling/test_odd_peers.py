"""Odd requests through three protocols, and peers that speak none: each is refused, and the rollout goes on."""

import asyncio
import json
import ssl
from base64 import b64encode
from typing import Any

import httpx
import pytest

from cua_rl.sampling.gateway import Gateway
from tests.patience import patience
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import FakeVllm

PNG = encode_image(make_image(64, 64, 0))
HI: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"type": "function", "name": "click", "parameters": {"type": "object"}}


def picture(data: bytes, kind: str = "image/png") -> Any:
    source = {"type": "base64", "media_type": kind, "data": b64encode(data).decode()}
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


def display(width: object) -> Any:
    return {
        "tools": [{"type": "computer_20250124", "name": "computer", "display_width_px": width, "display_height_px": 9}]
    }


def result(content: object) -> Any:
    block = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return {"messages": [HI, {"role": "user", "content": [block]}]}


ODD: dict[str, tuple[str, Any]] = {
    "half a PNG": ("messages", picture(PNG[: len(PNG) // 2])),
    "a drawing as a PNG": ("messages", picture(b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
    "a PNG with a JPEG's beginning": ("messages", picture(b"\xff\xd8\xff" + PNG)),
    "a picture that is elsewhere": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
    ),
    "a display without end": ("messages", display(10**400)),
    "a display that is true": ("messages", display(True)),
    "a display wider than any": (
        "responses",
        {"tools": [{"type": "computer_use_preview", "display_width": 2**40, "display_height": 2}]},
    ),
    "a call inside a result": ("messages", result([{"type": "tool_use", "id": "b", "name": "click", "input": {}}])),
    "a result that is a number": ("messages", result(3)),
    "arguments that are a text": (
        "messages",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]},
                HI,
            ]
        },
    ),
    "servers that the vendor would ask": ("messages", {"mcp_servers": [{"type": "url", "url": "https://a.example"}]}),
    "half a token": ("messages", {"max_tokens": 0.5}),
    "a stop that is half a character": ("responses", {"stop": "\ud800"}),
    "a stop sequence that is half a character": ("messages", {"stop_sequences": ["a", "\udfff"]}),
    "a schema that is not a number": (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": float("nan")}}}},
    ),
    "a schema of half a character": (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "\ud800"}}}},
    ),
    "an action of nothing": (
        "responses",
        {"tools": [{"type": "computer"}], "input": [{"type": "computer_call", "call_id": "a"}]},
    ),
    "a screen that is a word": (
        "responses",
        {
            "tools": [{"type": "computer"}],
            "input": [{"type": "computer_call_output", "call_id": "a", "output": "done"}],
        },
    ),
    "tools by name": ("responses", {"tools": {"click": FUNCTION}}),
    "a tool whose type is a list": ("messages", {"tools": [{"type": ["custom"], "name": "a", "input_schema": {}}]}),
    "tools of which none is there": (
        "responses",
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "fly"}]}},
    ),
    "a result before any call": ("chat", {"messages": [HI, {"role": "tool", "content": "done"}]}),
    "a call of the first API": (
        "chat",
        {"messages": [{"role": "assistant", "function_call": {"name": "click", "arguments": "{}"}}, HI]},
    ),
    "a voice": ("chat", {"messages": [HI, {"role": "assistant", "audio": {"id": "audio_1"}}]}),
    "calls by name": ("chat", {"messages": [HI, {"role": "assistant", "tool_calls": {"a": {}}}]}),
    "messages that are words": ("chat", {"messages": ["hi"]}),
    "two answers as a word": ("chat", {"n": "2"}),
    "a picture of nothing": (
        "chat",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
            ]
        },
    ),
}
PATHS = {"responses": "responses", "chat": "chat/completions", "messages": "messages"}
GOOD: dict[str, Any] = {
    "responses": {"input": [HI]},
    "chat": {"messages": [HI]},
    "messages": {"messages": [HI], "max_tokens": 9},
}


def peers(head: str) -> dict[str, bytes]:
    """What arrives on a socket; `head` has the address and the key of a rollout."""
    hello = ssl.MemoryBIO()
    connection = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="gateway.example")
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    post = f"POST {head}".encode()
    return {
        "one that begins TLS": hello.read(),
        "one that begins HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "one that sends two lengths": post + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
        "one whose length is negative": post + b"Content-Length: -1\r\n\r\n",
        "one whose body ends early": post + b"Content-Length: 99\r\n\r\n{",
        "one whose chunk has no size": post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "one with a method of its own": f"BREW {head}\r\n".encode(),
        "one with half a head": post,
        "one with a null in a name": post + b"X-\0: a\r\n\r\n",
        "one that asks for a socket": f"GET {head}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode(),
    }


async def ask_well(gateway: Gateway, url: str, api: str) -> None:
    access = gateway.access("r")
    assert access is not None
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1/", headers=headers, trust_env=False) as client:
        assert (await client.post(PATHS[api], json=GOOD[api])).status_code == 200


def assert_nothing_is_left(gateway: Gateway, num_turns: int) -> None:
    access, rollout = gateway.access("r"), gateway._open("r")
    assert access is not None
    assert (access.bodies.num_bytes, rollout.num_under_way, len(rollout.turns)) == (0, 0, num_turns)


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_request_is_refused_and_the_rollout_goes_on(name: str, gateway: Gateway, fake: FakeVllm) -> None:
    api, odd = ODD[name]
    gateway.open_rollout("r")
    access = gateway.access("r")
    assert access is not None
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
    async with gateway.serve() as url:
        async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1/", headers=headers, trust_env=False) as client:
            answer = await client.post(PATHS[api], content=json.dumps(GOOD[api] | odd))

        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("expected ")
        assert fake.requests == []
        assert_nothing_is_left(gateway, 0)
        await ask_well(gateway, url, api)
    assert_nothing_is_left(gateway, 1)


@pytest.mark.parametrize("name", peers(""))
async def test_a_peer_that_speaks_another_language_is_refused_and_the_rollout_goes_on(
    name: str, gateway: Gateway, fake: FakeVllm
) -> None:
    gateway.open_rollout("r")
    access = gateway.access("r")
    assert access is not None
    async with gateway.serve() as url:
        port = int(url.rpartition(":")[2])
        head = (
            f"/rollouts/r/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {access.api_key}\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(peers(head)[name])
        writer.write_eof()
        async with asyncio.timeout(patience(30)):
            said = await reader.read()
        writer.close()

        assert said == b"" or said.startswith(b"HTTP/1.1 4"), said[:200]
        assert fake.requests == []
        assert_nothing_is_left(gateway, 0)
        for api in PATHS:
            await ask_well(gateway, url, api)
    assert_nothing_is_left(gateway, 3)
