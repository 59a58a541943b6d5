"""Samples of prompts that are given as tokens and images."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.images import num_image_tokens
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.generation import Generated, GenerateParams, PromptError
from cua_rl.sampling.replica import RequestRejected
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import SamplingError
from cua_rl.types.rollout import AdapterRef, EncodedTextChunk, ImageChunk, ModelInput
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import LOGPROB, FakeVllm

PROMPT = ModelInput(chunks=(EncodedTextChunk(tokens=(5, 6, 7)),))


def adapter(model: str, version: int = 1) -> AdapterRef:
    return AdapterRef(path=Path(f"/adapters/{model}/{version}"), policy_version=version, model=model)


def image(renderer: Qwen3VLRenderer, seed: int, width_px: int = 96, height_px: int = 64) -> ImageChunk:
    assert renderer.image_settings is not None
    encoded = EncodedImage(
        data=encode_image(make_image(width_px, height_px, seed)), format="png", width_px=width_px, height_px=height_px
    )
    num_tokens = num_image_tokens(encoded.width_px, encoded.height_px, renderer.image_settings)
    return ImageChunk(image=encoded, expected_tokens=num_tokens)


async def generate(
    client: SamplingClient, prompt: ModelInput = PROMPT, *, ref: AdapterRef | None = None, **params: Any
) -> Generated:
    return await client.generate(prompt, GenerateParams(**params), image_token_id=IMAGE_TOKEN, adapter=ref)


IMAGE_TOKEN = 7_000_000
"""Of prompts without images."""


def asked(fake: FakeVllm) -> list[tuple[int, int | None]]:
    """How many samples each request wanted, and from which seed on."""
    return sorted((request["sampling_params"]["n"], request["sampling_params"]["seed"]) for request in fake.requests)


async def test_samples_come_with_their_logprobs_and_the_token_that_ended_them(
    client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers += ["one", "two"]
    generated = await generate(client, n=2)
    expected = [(*renderer.encode(text), renderer.stop_token_ids[0]) for text in ("one", "two")]
    assert [sequence.tokens for sequence in generated.sequences] == expected
    assert [sequence.logprobs for sequence in generated.sequences] == [(LOGPROB,) * len(one) for one in expected]
    assert [sequence.stop_reason for sequence in generated.sequences] == ["stop", "stop"]
    assert (generated.prompt_logprobs, generated.topk_prompt_logprobs) == (None, None)
    assert "max_tokens" not in fake.requests[0]["sampling_params"]


async def test_images_go_out_in_order_as_their_own_bytes_neighbours_too(
    client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    small, large = image(renderer, 1), image(renderer, 2, 192, 128)
    chunks = (EncodedTextChunk(tokens=(5,)), large, small, EncodedTextChunk(tokens=(6,)), small)
    prompt = ModelInput(chunks=chunks)
    for _ in range(2):
        await client.generate(prompt, GenerateParams(max_tokens=2), image_token_id=renderer.image_token_id)
    token = renderer.image_token_id
    assert [request["token_ids"] for request in fake.requests] == [[5, token, token, 6, token]] * 2
    urls = [[part["url"] for part in request["content_parts"]] for request in fake.requests]
    assert urls == [[chunk.image.data_url() for chunk in (large, small, small)], [None] * 3]


async def test_a_prompt_that_is_another_one_on_the_server_is_refused(
    client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    wrong = ImageChunk(image=image(renderer, 1).image, expected_tokens=image(renderer, 1).expected_tokens + 1)
    prompt = ModelInput(chunks=(EncodedTextChunk(tokens=(5,)), wrong))
    with pytest.raises(SamplingError, match=r"expected images of \[\d+\] tokens in the server's prompt"):
        await client.generate(prompt, GenerateParams(), image_token_id=renderer.image_token_id)
    fake.extra_prompt_token = 9
    with pytest.raises(SamplingError, match="got others from position 0 on"):
        await generate(client)


async def test_text_with_the_token_of_images_is_refused_before_it_is_sent(
    client: SamplingClient, fake: FakeVllm
) -> None:
    with pytest.raises(PromptError, match="each image as a chunk of its own"):
        await client.generate(PROMPT, GenerateParams(), image_token_id=6)
    with pytest.raises(PromptError, match="at least one token"):
        await generate(client, ModelInput(chunks=()))
    assert fake.requests == []


async def test_one_request_scores_the_prompt_and_leaves_out_images(
    client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    picture = image(renderer, 1)
    prompt = ModelInput(chunks=(EncodedTextChunk(tokens=(5, 6)), picture, EncodedTextChunk(tokens=(8,))))
    params = GenerateParams(n=3, seed=10, prompt_logprobs=True, topk_prompt_logprobs=1)
    generated = await client.generate(prompt, params, image_token_id=renderer.image_token_id)
    places = (None,) * picture.length
    assert generated.prompt_logprobs == (None, -2.0, *places, -2.0)
    top = ((0, -0.25),)
    assert generated.topk_prompt_logprobs == (None, top, *places, top)
    assert len(generated.sequences) == 3
    assert asked(fake) == [(1, 10), (2, 11)]
    assert sum("prompt_logprobs" in request["sampling_params"] for request in fake.requests) == 1


async def test_several_samples_at_temperature_0_are_one_repeated(client: SamplingClient, fake: FakeVllm) -> None:
    generated = await generate(client, n=3, temperature=0.0)
    assert asked(fake) == [(1, None)]
    assert generated.sequences == (generated.sequences[0],) * 3


async def test_more_samples_than_the_server_takes_at_a_time_are_drawn_in_parts(
    client: SamplingClient, fake: FakeVllm
) -> None:
    """Sample i keeps the seed 100 + i: 7 are 3 and 4, then 1 and 2, 2 and 2."""
    fake.max_num_seqs = 2
    generated = await generate(client, n=7, seed=100)
    assert len(generated.sequences) == 7
    assert [part for part in asked(fake) if part[0] <= 2] == [(1, 100), (2, 101), (2, 103), (2, 105)]


async def test_a_parameter_that_the_server_refuses_says_so(client: SamplingClient, fake: FakeVllm) -> None:
    fake.refusal = (400, "top_p must be in (0, 1], got 2.0.")
    with pytest.raises(RequestRejected, match="top_p must be in") as refused:
        await generate(client, top_p=2.0)
    assert refused.value.status == 400
    assert len(fake.requests) == 1


async def test_samples_that_do_not_fit_their_logprobs_are_refused(client: SamplingClient, fake: FakeVllm) -> None:
    fake.sampled_logprob = -9999.0  # vLLM's word for minus infinity and for no number
    with pytest.raises(SamplingError, match="a log-probability for each of"):
        await generate(client)


@pytest_asyncio.fixture
async def small(fake: FakeVllm) -> AsyncGenerator[SamplingClient]:
    """A client of a server with room for two adapters."""
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run", max_adapters=2) as client:
            yield client


async def test_adapters_of_several_models_do_not_share_a_name(small: SamplingClient, fake: FakeVllm) -> None:
    await generate(small, ref=adapter("a"))
    await generate(small, ref=adapter("b"))
    assert [request["model"] for request in fake.requests] == ["a-000001-run", "b-000001-run"]
    assert fake.adapters == {"a-000001-run": "/adapters/a/1", "b-000001-run": "/adapters/b/1"}


async def test_the_least_recently_used_adapter_leaves_and_comes_back(small: SamplingClient, fake: FakeVllm) -> None:
    for model in ("a", "b", "a", "c"):
        await generate(small, ref=adapter(model))
    assert fake.unloaded == ["b-000001-run"]
    await generate(small, ref=adapter("b"))
    assert fake.unloaded == ["b-000001-run", "a-000001-run"]
    assert sorted(fake.adapters) == ["b-000001-run", "c-000001-run"]


async def test_no_adapter_leaves_while_it_is_in_use(small: SamplingClient, fake: FakeVllm) -> None:
    fake.gate = asyncio.Event()
    waiting = [asyncio.create_task(generate(small, ref=adapter(model))) for model in "abc"]
    async with asyncio.timeout(10):
        while len(fake.requests) < 3:
            await asyncio.sleep(0.01)
    assert fake.unloaded == []
    fake.gate.set()
    await asyncio.gather(*waiting)
    await generate(small, ref=adapter("d"))
    assert len(fake.adapters) == 2
    assert "d-000001-run" in fake.adapters


async def test_an_adapter_that_comes_back_while_it_leaves_is_loaded_after_that(
    small: SamplingClient, fake: FakeVllm
) -> None:
    for model in "ab":
        await generate(small, ref=adapter(model))
    fake.unload_gate = asyncio.Event()
    fake.changes.clear()
    displacing = asyncio.create_task(generate(small, ref=adapter("c")))
    async with asyncio.timeout(10):
        while not fake.changes:
            await asyncio.sleep(0.01)
    returning = asyncio.create_task(generate(small, ref=adapter("a")))
    await generate(small, ref=adapter("b"))  # a request takes longer than a load that does not wait
    fake.unload_gate.set()
    await asyncio.gather(displacing, returning)
    names = ["unload a-000001-run", "unloaded a-000001-run"]
    assert fake.changes[:2] == names
    assert "load a-000001-run" in fake.changes[2:]
    await generate(small, ref=adapter("a"))
    assert small.replicas[0].why_lost == ""


async def test_many_requests_for_more_adapters_than_there_is_room_for_all_find_theirs(
    small: SamplingClient, fake: FakeVllm
) -> None:
    wanted = [adapter(model) for model in "abcde"] * 8
    answers = await asyncio.gather(*(generate(small, ref=ref) for ref in wanted))
    assert len(answers) == len(wanted)
    assert small.replicas[0].why_lost == ""
