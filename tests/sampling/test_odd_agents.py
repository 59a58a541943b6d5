"""What agents do that nobody meant: each gets an answer or a reason, and the rollout goes on with nothing left open."""

import asyncio
import json
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cua_rl.sampling.gateway import Gateway
from tests.patience import patience
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import FakeVllm
from tests.sampling.test_odd_peers import FUNCTION, HI, PATHS, ask_well

CALLS = "".join(
    f'<tool_call>\n{{"name": "click", "arguments": {{"x": {number}}}}}\n</tool_call>\n' for number in (1, 2)
).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An agent at the gateway, beside the model server that it does not see."""

    client: httpx.AsyncClient
    gateway: Gateway
    fake: FakeVllm

    async def post(self, body: object, api: str = "responses", **more: Any) -> httpx.Response:
        return await self.client.post(PATHS[api], json=body, **more)


Answers = list[httpx.Response]


def seen(width: int, height: int) -> Any:
    data = b64encode(encode_image(make_image(width, height, 0))).decode()
    return {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}]}


def result(call_id: str) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


def asks(*bodies: Any, api: str = "responses", **more: Any) -> Callable[[Peer], Awaitable[Answers]]:
    """One request after the other."""

    async def act(peer: Peer) -> Answers:
        return [await peer.post(body, api, **more) for body in bodies]

    return act


async def leaves_while_the_model_writes(peer: Peer) -> Answers:
    peer.fake.gate = asyncio.Event()
    asking = asyncio.create_task(peer.post({"input": [HI]}))
    await peer.fake.has_arrived.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    peer.fake.gate.set()
    return []


async def leaves_within_a_stream(peer: Peer) -> Answers:
    async with peer.client.stream("POST", PATHS["responses"], json={"input": [HI], "stream": True}) as answer:
        async for _ in answer.aiter_raw(10):
            return [answer]
    raise AssertionError


async def sends_a_body_without_end(peer: Peer) -> Answers:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"input": "'
        yield b"a" * 1000
        raise ConnectionAbortedError

    headers = {"Content-Type": "application/json"}
    with pytest.raises((ConnectionAbortedError, httpx.TransportError)):
        await peer.client.post(PATHS["responses"], content=body(), headers=headers)
    return []


async def sends_it_twice_at_once(peer: Peer) -> Answers:
    return list(await asyncio.gather(*[peer.post({"input": [HI]}) for _ in range(2)]))


async def sends_a_hundred_at_once(peer: Peer) -> Answers:
    return list(await asyncio.gather(*[peer.post({"input": f"step {number}"}) for number in range(100)]))


async def calls_of(peer: Peer) -> tuple[Answers, list[Any], list[str]]:
    """After an answer with two calls: the conversation so far, and their ids."""
    peer.fake.answers.append(CALLS)
    first = await peer.post({"input": [HI], "tools": [FUNCTION]})
    output = first.json()["output"]
    return [first], [HI, *output], [item["call_id"] for item in output]


def answers_calls(*order: int) -> Callable[[Peer], Awaitable[Answers]]:
    """With the results of these of its calls, in this order; -1 is a call that was not there."""

    async def act(peer: Peer) -> Answers:
        first, items, ids = await calls_of(peer)
        results = [result([*ids, "call_x"][number]) for number in order]
        return [*first, await peer.post({"input": [*items, *results], "tools": [FUNCTION]})]

    return act


async def names_a_response_of_another_rollout(peer: Peer) -> Answers:
    peer.gateway.open_rollout("other")
    theirs = await peer.gateway.answer("other", {"input": [HI]}, "responses")
    named = [{"previous_response_id": theirs.turn.response_id}, {"previous_response_id": "resp_0"}]
    answers = [await peer.post({"input": [HI], **one}) for one in named]
    peer.gateway.close_rollout("other")
    return answers


async def comes_with_the_key_of_another_rollout(peer: Peer) -> Answers:
    peer.gateway.open_rollout("other")
    access = peer.gateway.access("other")
    assert access is not None
    answer = await peer.post({"input": [HI]}, headers={"Authorization": f"Bearer {access.api_key}"})
    peer.gateway.close_rollout("other")
    return [answer]


async def packs_its_body(peer: Peer) -> Answers:
    packed = zlib.compress(b" " * 10_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    return [await peer.client.post(PATHS["responses"], content=packed, headers=headers)]


async def nests_without_end(peer: Peer) -> Answers:
    deep = b'{"input": ' + b"[" * 100_000
    return [await peer.client.post(PATHS["responses"], content=deep, headers={"Content-Type": "application/json"})]


# what it does, the statuses of its answers, how many of them are turns
ODD: dict[str, tuple[Callable[[Peer], Awaitable[Answers]], list[int], int]] = {
    "leaves while the model writes": (leaves_while_the_model_writes, [], 1),
    "leaves within a stream": (leaves_within_a_stream, [200], 1),
    "sends a body without end": (sends_a_body_without_end, [], 0),
    "sends a request twice at once": (sends_it_twice_at_once, [200] * 2, 2),
    "sends a hundred requests at once": (sends_a_hundred_at_once, [200] * 100, 100),
    "answers calls in another order": (answers_calls(1, 0), [200] * 2, 2),
    "answers one call of two": (answers_calls(1), [200] * 2, 2),
    "answers a call twice": (answers_calls(0, 0, 1), [200] * 2, 2),  # the model reads what it is told
    "answers a call that nobody made": (answers_calls(0, 1, -1), [200] * 2, 2),
    "names a response of another rollout": (names_a_response_of_another_rollout, [400] * 2, 0),
    "comes with the key of another rollout": (comes_with_the_key_of_another_rollout, [401], 0),
    "sends ten megabytes of text": (asks({"input": "a b " * 2_500_000}), [400], 0),
    "sends twenty thousand messages": (asks({"input": [HI] * 20_000}), [400], 0),
    "packs its body": (packs_its_body, [415], 0),
    "nests without end": (nests_without_end, [400], 0),
    "changes its tools between turns": (
        asks({"input": [HI], "tools": [FUNCTION]}, {"input": [HI], "tools": [{**FUNCTION, "name": "tap"}]}),
        [200] * 2,
        2,
    ),
    "names two tools alike": (asks({"input": [HI], "tools": [FUNCTION, FUNCTION]}), [200], 1),
    "offers a thousand tools": (
        asks({"input": [HI], "tools": [{**FUNCTION, "name": f"click_{number}"} for number in range(1000)]}),
        [400],
        0,
    ),
    "shows one pixel": (asks({"input": [seen(1, 1)]}), [200], 1),
    "shows a line": (asks({"input": [seen(1, 5000)]}), [400], 0),
    "shows 8000 pixels on each side": (asks({"input": [seen(8000, 8000)]}), [400], 0),
    "sends items of no known type": (asks({"input": [HI, {"type": "hologram", "id": "h"}]}), [400], 0),
    "refers to an item that is not there": (asks({"input": [HI, {"type": "item_reference", "id": "x"}]}), [400], 0),
    "wants fewer tokens than none": (
        asks({"input": [HI], "max_output_tokens": -1}, {"input": [HI], "max_output_tokens": 0}),
        [400] * 2,
        0,
    ),
    "cannot decide whether to train": (asks({"input": [HI]}, headers={"CUA-Train": "maybe"}), [400], 0),
    "sends nothing": (asks({}, [], None, "hi"), [400] * 4, 0),
}


@pytest.mark.parametrize("name", ODD)
async def test_what_an_agent_does_gets_an_answer_or_a_reason(name: str, gateway: Gateway, fake: FakeVllm) -> None:
    act, statuses, num_turns = ODD[name]
    gateway.open_rollout("r")
    access = gateway.access("r")
    assert access is not None
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with gateway.serve() as url:
        async with httpx.AsyncClient(
            base_url=f"{url}/rollouts/r/v1/", headers=headers, trust_env=False, timeout=patience(60)
        ) as client:
            answers = await act(Peer(client=client, gateway=gateway, fake=fake))

        assert [answer.status_code for answer in answers] == statuses, [answer.text[:300] for answer in answers[-1:]]
        for answer in answers:
            if answer.status_code != 200:
                error = json.loads(answer.text)["error"]
                assert error["message"].startswith("expected "), error
                assert "Traceback" not in answer.text
        rollout = gateway._open("r")
        async with asyncio.timeout(patience(30)):
            while rollout.num_under_way or access.bodies.num_bytes:
                await asyncio.sleep(0.01)
        assert len(rollout.turns) == num_turns
        await ask_well(gateway, url, "responses")
    assert len(rollout.turns) == num_turns + 1
    assert len({turn.response_id for turn in rollout.turns}) == num_turns + 1
    assert gateway.prompt_mismatches == 0
