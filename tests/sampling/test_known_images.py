"""Screenshots that the model server has are named, not sent again."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.known_images import takes_names
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.rollout import SamplingParams
from tests.renderers.generated import encode_image, make_image
from tests.renderers.test_image_urls import url_of
from tests.sampling.fake_vllm import FakeVllm


def question(seed: int) -> Any:
    url = url_of(encode_image(make_image(64, 96, seed)))
    return {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}


def sent_data(request: Any) -> list[bool]:
    """For each image of a request, whether its data came along."""
    parts = [part for item in request["input"] for part in item.get("content", ()) if isinstance(part, dict)]
    return [part["image_url"] is not None for part in parts if part["type"] == "input_image"]


async def ask_three_times(agent: AsyncOpenAI) -> None:
    for number in (1, 2, 3):
        await agent.responses.create(model="policy", input=[question(seed) for seed in range(number)])


async def test_each_screenshot_is_sent_once_and_the_prompt_stays_the_same(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r1")

    await ask_three_times(gateway.openai_client("r1"))

    assert [sent_data(request) for request in fake.requests] == [[True], [False, True], [False, False, True]]
    assert gateway.prompt_mismatches == 0
    assert [len(turn.prompt.images) for turn in gateway.turns("r1")] == [1, 2, 3]


async def test_all_screenshots_are_sent_to_a_server_that_has_dropped_one(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r1")
    agent = gateway.openai_client("r1")
    await agent.responses.create(model="policy", input=[question(0)])
    fake.images.clear()  # it needed the memory, or was restarted

    await agent.responses.create(model="policy", input=[question(0), question(1)])
    await agent.responses.create(model="policy", input=[question(0), question(1)])

    expected = [[True], [False, True], [True, True], [False, False]]
    assert [sent_data(request) for request in fake.requests] == expected


async def test_a_server_that_keeps_no_images_is_sent_all_of_them_after_one_refusal(
    gateway: Gateway, fake: FakeVllm
) -> None:
    fake.keeps_images = False
    gateway.open_rollout("r1")

    await ask_three_times(gateway.openai_client("r1"))

    expected = [[True], [False, True], [True, True], [True, True, True]]
    assert [sent_data(request) for request in fake.requests] == expected
    assert [len(turn.prompt.images) for turn in gateway.turns("r1")] == [1, 2, 3]


async def test_a_refusal_for_another_reason_says_nothing_of_images(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r1")
    agent = gateway.openai_client("r1")
    await agent.responses.create(model="policy", input=[question(0)])
    fake.refusal = (400, "out of order")
    with pytest.raises(BadRequestError, match="out of order"):
        await agent.responses.create(model="policy", input=[question(0), question(1)])
    fake.refusal = None

    for _ in range(2):
        await agent.responses.create(model="policy", input=[question(0), question(1)])

    expected = [[True], [False, True], [True, True], [True, True], [False, False]]
    assert [sent_data(request) for request in fake.requests] == expected


async def test_a_request_that_failed_teaches_nothing(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r1")
    agent = gateway.openai_client("r1")
    fake.failures.append(500)

    await agent.responses.create(model="policy", input=[question(0)])

    assert [sent_data(request) for request in fake.requests] == [[True], [True]]


async def test_servers_that_may_ignore_names_get_every_screenshot(fake: FakeVllm, renderer: Qwen3VLRenderer) -> None:
    fake.version = "0.31.4"
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server) as client:
            gateway = Gateway(client, renderer, SamplingParams(max_tokens=64, temperature=1.0))
            gateway.open_rollout("r1")
            await ask_three_times(gateway.openai_client("r1"))
    assert [sent_data(request) for request in fake.requests] == [[True], [True, True], [True, True, True]]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.32.0", True), ("0.33.1+cu129", True), ("1.0.0", True), ("0.31.0", False), ("dev", False)],
)
def test_the_version_tells_whether_a_server_takes_names(version: str, expected: bool) -> None:
    assert takes_names(version) is expected
