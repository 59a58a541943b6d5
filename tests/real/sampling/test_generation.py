"""Prompts as tokens and images on a real vLLM, whose log-probabilities are the trainer's."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from cua_rl.renderers.images import num_image_tokens
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.address import server_client
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.generation import GENERATE_PATH, Generated, GenerateParams, score_answer
from cua_rl.sampling.replica import RequestRejected
from cua_rl.sampling.server import VllmServer
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import AdapterRef, Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput
from tests.real.sampling.tiny_model import build_adapter
from tests.renderers.generated import encode_image, make_image
from tests.rounding import rounding_bound

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUNDINGS = 10_000
"""Chain of roundings of a log-probability: 4 layers of six products of up to 256 terms, 2 vision layers of as many of
192, the head's 128, and a softmax over some hundred entries, in the server and in the trainer."""


@pytest_asyncio.fixture(loop_scope="session")
async def client(vllm: VllmServer) -> AsyncGenerator[SamplingClient]:
    async with SamplingClient(vllm, namespace="generate", max_adapters=4) as sampling:
        yield sampling
        async with server_client(vllm.base_url, vllm.api_key) as plain:  # the server is shared by all tests
            for adapter in sampling.replicas[0].loaded:
                await plain.post("/v1/unload_lora_adapter", json={"lora_name": f"{adapter.name}-generate"})


@pytest.fixture(scope="session")
def trainer(tiny_model: Path) -> Trainer:
    return Trainer(TrainerConfig(model_path=tiny_model, lora_rank=8, lora_alpha=16))


@pytest.fixture(scope="session")
def trained(trainer: Trainer, tiny_renderer: Qwen3VLRenderer, tmp_path_factory: pytest.TempPathFactory) -> AdapterRef:
    """The trainer's adapter after a large step."""
    datum = text_datum(prompt_of(tiny_renderer, "Open the mail."), tiny_renderer.encode("It is open now."))
    trainer.forward_backward(wire.ForwardBackward(datums=(datum,), loss=LossConfig()))
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=3e-2)))
    path = tmp_path_factory.mktemp("trained") / "adapter"
    trainer.save_weights_for_sampler(path)
    return AdapterRef(path=path, policy_version=1, model="trained")


def prompt_of(renderer: Qwen3VLRenderer, *parts: str | ImageChunk) -> ModelInput:
    chunks: list[Chunk] = [
        EncodedTextChunk(tokens=tuple(renderer.encode(part))) if isinstance(part, str) else part for part in parts
    ]
    return ModelInput(chunks=tuple(chunks))


def picture(renderer: Qwen3VLRenderer, seed: int, width_px: int = 96, height_px: int = 64) -> ImageChunk:
    assert renderer.image_settings is not None
    encoded = EncodedImage(
        data=encode_image(make_image(width_px, height_px, seed)), format="png", width_px=width_px, height_px=height_px
    )
    return ImageChunk(image=encoded, expected_tokens=num_image_tokens(width_px, height_px, renderer.image_settings))


def text_datum(prompt: ModelInput, sampled: Sequence[int]) -> Datum:
    """Prompt and answer, with every text token but the first on the mask."""
    whole = ModelInput(chunks=(*prompt.chunks, EncodedTextChunk(tokens=tuple(sampled))))
    mask = [isinstance(chunk, EncodedTextChunk) for chunk in whole.chunks for _ in range(chunk.length)]
    mask[0] = False
    return Datum(
        rollout_id="r",
        model_input=whole,
        loss_mask=tuple(mask),
        advantages=tuple(map(float, mask)),
        sampling_logprobs=(0.0,) * len(mask),
        policy_versions=(0,),
    )


def trained_logprobs(
    trainer: Trainer, prompt: ModelInput, sampled: Sequence[int], temperature: float = 1.0
) -> tuple[tuple[float | None, ...], tuple[float, ...]]:
    """The trainer's log-probabilities of the prompt, in the form of `Generated.prompt_logprobs`, and of the answer."""
    datum = text_datum(prompt, sampled)
    request = wire.Forward(datums=(datum,), temperature=temperature, weights="policy")
    (row,) = trainer.forward(request).training_logprobs
    of_prompt = [logprob if is_text else None for logprob, is_text in zip(row, datum.loss_mask, strict=True)]
    return tuple(of_prompt[: prompt.length]), row[prompt.length :]


def assert_same(found: Sequence[float | None], expected: Sequence[float | None]) -> None:
    assert [entry is None for entry in found] == [entry is None for entry in expected]
    numbers = [entry for entry in expected if entry is not None]
    bound = rounding_bound(max(map(abs, numbers)), ROUNDINGS)
    assert [entry for entry in found if entry is not None] == pytest.approx(numbers, abs=bound)


async def generate(
    client: SamplingClient, renderer: Qwen3VLRenderer, prompt: ModelInput, ref: AdapterRef | None = None, **params: Any
) -> Generated:
    token = renderer.image_token_id
    return await client.generate(prompt, GenerateParams(**params), image_token_id=token, adapter=ref)


async def test_samples_and_prompts_have_the_trainers_logprobs(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, trainer: Trainer, trained: AdapterRef
) -> None:
    first, second = picture(tiny_renderer, 1, 160, 96), picture(tiny_renderer, 2)
    prompt = prompt_of(tiny_renderer, "Look: <|vision_start|>", first, "<|vision_end|> and ", second, " Tell me.")
    generated = await generate(client, tiny_renderer, prompt, trained, n=3, max_tokens=12, prompt_logprobs=True)

    assert generated.prompt_logprobs is not None
    assert len({sequence.tokens for sequence in generated.sequences}) == 3
    for sequence in generated.sequences:
        of_prompt, of_answer = trained_logprobs(trainer, prompt, sequence.tokens)
        assert_same(generated.prompt_logprobs, of_prompt)
        assert_same(sequence.logprobs, of_answer)
        assert (sequence.stop_reason == "length") == (sequence.tokens[-1] not in tiny_renderer.stop_token_ids)


async def test_logprobs_at_another_temperature_are_those_of_the_scaled_distribution(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, trainer: Trainer, trained: AdapterRef
) -> None:
    prompt = prompt_of(tiny_renderer, "Open ", picture(tiny_renderer, 3), " now.")
    params = {"max_tokens": 8, "temperature": 0.5, "prompt_logprobs": True}
    generated = await generate(client, tiny_renderer, prompt, trained, **params)
    (sequence,) = generated.sequences
    assert_same(sequence.logprobs, trained_logprobs(trainer, prompt, sequence.tokens, temperature=0.5)[1])
    assert generated.prompt_logprobs is not None
    assert_same(generated.prompt_logprobs, trained_logprobs(trainer, prompt, sequence.tokens)[0])


async def test_an_answer_that_is_given_has_the_logprobs_that_it_has_when_it_is_sampled(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, trainer: Trainer, trained: AdapterRef
) -> None:
    prompt = prompt_of(tiny_renderer, "Open <|vision_start|>", picture(tiny_renderer, 4), "<|vision_end|> now.")
    answer = tiny_renderer.encode("It is open now.<|im_end|>")

    async def ask(request: Mapping[str, object]) -> Mapping[str, object]:
        return (await client.respond(GENERATE_PATH, request, adapter=trained))[0]

    # greedy sampling reports what it would at temperature 1
    for temperature, reported_at in ((1.0, 1.0), (0.5, 0.5), (0.0, 1.0)):
        found = await score_answer(ask, prompt, answer, temperature, tiny_renderer.image_token_id)
        assert_same(found, trained_logprobs(trainer, prompt, answer, reported_at)[1])


def positions_of(prompt: ModelInput) -> torch.Tensor:
    """[3, 1, tokens]: text counts on in all of time, height and width; an image of r x c tokens stands still in time,
    counts its rows and columns, and the text behind it goes on after the longer side.
    """
    columns, start = list[tuple[int, int, int]](), 0
    for chunk in prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            columns += [(at, at, at) for at in range(start, start + chunk.length)]
            start += chunk.length
            continue
        num_rows, num_columns = chunk.image.height_px // 32, chunk.image.width_px // 32
        columns += [(start, start + row, start + column) for row in range(num_rows) for column in range(num_columns)]
        start += max(num_rows, num_columns)
    return torch.tensor(columns).T[:, None]


def transformers_logprobs(folder: Path, renderer: Qwen3VLRenderer, prompt: ModelInput) -> tuple[float | None, ...]:
    """The base model's log-probabilities of a prompt by Transformers, at positions of our own."""
    pictures = [Image.open(BytesIO(image.data)).convert("RGB") for image in prompt.images]
    inputs: Any = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = torch.tensor([prompt.token_ids(renderer.image_token_id)])
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions_of(prompt), **inputs).logits
    rows = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
    mask = text_datum(prompt, ()).loss_mask
    return tuple(row if is_text else None for row, is_text in zip((0.0, *rows), mask, strict=True))


async def test_the_order_of_images_is_kept_neighbours_too(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, tiny_model: Path
) -> None:
    """Images of one size, so that only their order tells the prompts apart."""
    first, second = picture(tiny_renderer, 4), picture(tiny_renderer, 5)
    scores = list[tuple[float | None, ...]]()
    for images in ((first, second), (second, first)):
        prompt = prompt_of(tiny_renderer, "Compare ", *images, " here.")
        generated = await generate(client, tiny_renderer, prompt, max_tokens=1, prompt_logprobs=True)
        assert generated.prompt_logprobs is not None
        assert_same(generated.prompt_logprobs, transformers_logprobs(tiny_model, tiny_renderer, prompt))
        scores.append(generated.prompt_logprobs)
    gap = max(abs((one or 0.0) - (other or 0.0)) for one, other in zip(*scores, strict=True))
    assert gap > 1e-3


async def test_scores_of_a_cached_prompt_are_complete(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, trained: AdapterRef
) -> None:
    prompt = prompt_of(tiny_renderer, "A long text. " * 20, picture(tiny_renderer, 6), " And its end." * 5)
    scored = [
        (await generate(client, tiny_renderer, prompt, trained, max_tokens=1, prompt_logprobs=asks)).prompt_logprobs
        for asks in (False, True, False, True)
    ]
    assert scored[0] is scored[2] is None
    assert scored[1] is not None
    assert scored[3] is not None
    assert len(scored[1]) == prompt.length
    assert_same(scored[3], scored[1])


async def test_a_seed_draws_the_same_samples_one_by_one(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> None:
    prompt = prompt_of(tiny_renderer, "Say something ", picture(tiny_renderer, 7))
    whole = await generate(client, tiny_renderer, prompt, n=3, seed=40, max_tokens=16)
    scored = await generate(client, tiny_renderer, prompt, n=3, seed=40, max_tokens=16, prompt_logprobs=True)
    singles = [await generate(client, tiny_renderer, prompt, seed=40 + i, max_tokens=16) for i in range(3)]
    expected = [single.sequences[0].tokens for single in singles]
    assert len(set(expected)) == 3
    assert [sequence.tokens for sequence in whole.sequences] == expected
    assert [sequence.tokens for sequence in scored.sequences] == expected


async def test_more_samples_than_the_batch_holds(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> None:
    """The server takes 32 at a time."""
    generated = await generate(client, tiny_renderer, prompt_of(tiny_renderer, "Many."), n=70, seed=1, max_tokens=3)
    assert len(generated.sequences) == 70
    assert len({sequence.tokens for sequence in generated.sequences}) > 60


async def test_greedy_samples_are_repeated_and_have_the_trainers_logprobs(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, trainer: Trainer, trained: AdapterRef
) -> None:
    prompt = prompt_of(tiny_renderer, "Open mail.")
    generated = await generate(client, tiny_renderer, prompt, trained, n=3, temperature=0.0, max_tokens=6)
    assert len(set(generated.sequences)) == 1
    sequence = generated.sequences[0]
    assert_same(sequence.logprobs, trained_logprobs(trainer, prompt, sequence.tokens)[1])


async def test_stops_are_exact(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> None:
    prompt = prompt_of(tiny_renderer, "Tell a story.")
    free = {"temperature": 0.0, "max_tokens": 24, "ignores_end_of_turn": True}
    (whole,) = (await generate(client, tiny_renderer, prompt, **free)).sequences
    assert (len(whole.tokens), whole.stop_reason) == (24, "length")

    token = whole.tokens[10]
    (stopped,) = (await generate(client, tiny_renderer, prompt, **free, stop_token_ids=(token,))).sequences
    end = whole.tokens.index(token) + 1
    assert (stopped.tokens, stopped.stop_reason) == (whole.tokens[:end], "stop")
    assert len(stopped.logprobs) == end

    words = [tiny_renderer.decode((one,)) for one in whole.tokens]  # random bytes, too, of characters never completed
    text = next(word for word in words[6:] if word.isascii() and word.strip())
    (by_text,) = (await generate(client, tiny_renderer, prompt, **free, stop_strings=("never", text))).sequences
    end = next(at for at in range(1, 25) if text in tiny_renderer.decode(whole.tokens[:at]))
    assert (by_text.tokens, by_text.stop_reason) == (whole.tokens[:end], "stop")
    assert len(by_text.logprobs) == end


async def test_without_a_limit_samples_fill_the_context(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> None:
    prompt = ModelInput(chunks=(EncodedTextChunk(tokens=tuple(tiny_renderer.encode("word ") * 2000)[:2000]),))
    (sequence,) = (await generate(client, tiny_renderer, prompt, ignores_end_of_turn=True)).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (2048 - prompt.length, "length")


async def test_the_most_likely_tokens_are_reported_with_their_logprobs(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer
) -> None:
    picture_there = picture(tiny_renderer, 8)
    prompt = prompt_of(tiny_renderer, "See ", picture_there, " there.")
    params = {"max_tokens": 6, "topk_logprobs": 4, "topk_prompt_logprobs": 3, "prompt_logprobs": True, "seed": 3}
    generated = await generate(client, tiny_renderer, prompt, **params)
    (sequence,) = generated.sequences
    assert sequence.topk_logprobs is not None
    assert [len(top) for top in sequence.topk_logprobs] == [4] * len(sequence.tokens)
    top_prompt, scores = generated.topk_prompt_logprobs, generated.prompt_logprobs
    assert top_prompt is not None
    assert scores is not None
    assert [None if top is None else len(top) for top in top_prompt] == [None if one is None else 3 for one in scores]
    places = [*zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True)]
    for token, logprob, top in places:
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert dict(top).get(token, logprob) == logprob
        assert logprob <= values[0]


async def test_more_adapters_in_use_than_the_server_has_places_answer_as_each_alone(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer, tiny_model: Path, tmp_path: Path
) -> None:
    """The server has four places; seven models sample at the same time, several times each."""
    refs = [
        AdapterRef(
            path=build_adapter(tiny_model, tmp_path / str(seed), scale=0.2, seed=seed),
            policy_version=3,
            model=f"model{seed}",
        )
        for seed in range(7)
    ]
    prompt, params = prompt_of(tiny_renderer, "Open mail."), {"temperature": 0.0, "max_tokens": 10}
    alone = [(await generate(client, tiny_renderer, prompt, ref, **params)).sequences[0].tokens for ref in refs]
    assert len(set(alone)) == 7
    assert len(client.replicas[0].loaded) == 4
    together = await asyncio.gather(*(generate(client, tiny_renderer, prompt, ref, **params) for ref in refs * 4))
    assert [answer.sequences[0].tokens for answer in together] == alone * 4
    assert client.replicas[0].why_lost == ""


async def test_what_the_server_cannot_do_is_refused_with_its_reason(
    client: SamplingClient, tiny_renderer: Qwen3VLRenderer
) -> None:
    prompt = prompt_of(tiny_renderer, "Open mail.")
    too_long = ModelInput(chunks=prompt.chunks * 1000)
    with pytest.raises(RequestRejected, match="2048"):
        await generate(client, tiny_renderer, too_long, max_tokens=1)
    with pytest.raises(RequestRejected, match="top_p"):
        await generate(client, tiny_renderer, prompt, top_p=0.0)
    with pytest.raises(RequestRejected, match="At most 4 image"):
        await generate(client, tiny_renderer, prompt_of(tiny_renderer, *[picture(tiny_renderer, 9)] * 5))
