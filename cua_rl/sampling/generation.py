"""Sampling from tokens and images: requests to vLLM's token-in-token-out endpoint, and their answers.

The prompt goes out as token ids with one image token per image; the server decodes the images, and expands their tokens
by their sizes. It reports the prompt that it then has, which must be the one that was asked for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cua_rl.sampling.replica import RequestRejected
from cua_rl.sampling.vllm_responses import first_difference
from cua_rl.types.errors import CuaError, SamplingError
from cua_rl.types.json_values import mapping, sequence
from cua_rl.types.rollout import EncodedTextChunk, ImageChunk, ModelInput

GENERATE_PATH = "/inference/v1/generate"
_TOO_MANY_SAMPLES = "max_num_seqs"
"""Part of vLLM's message for more samples in a request than it computes at a time."""
_LEAST_LOGPROB = -9999.0
"""What vLLM reports for minus infinity and for no number."""

TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of a position with their log-probabilities, most likely first."""


class PromptError(CuaError):
    """A prompt that does not say what the model would read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """How a prompt is continued, `n` times.

    Log-probabilities of samples are those of the distribution that they are drawn from: after scaling by temperature,
    among the tokens that top-p and top-k leave. At temperature 0 they are those of temperature 1, as are always those
    of the prompt.
    """

    max_tokens: int | None = None
    """None: as many as the context holds."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    seed: int | None = None
    """Sample number i, from 0, has the seed `seed + i`."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's end of turn; the token that stops a sample is its last one."""
    stop_strings: tuple[str, ...] = ()
    """A sample that contains one ends with the token that completes it."""
    ignores_end_of_turn: bool = False
    """Whether samples go on after the model's end of turn, unless it is among `stop_token_ids`."""
    n: int = 1
    topk_logprobs: int = 0
    """Most likely tokens to report at each position of a sample; vLLM's limit is 20, less one."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    """The same at each position of the prompt; the limit is 20."""

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSequence:
    """One sample, with the token that stopped it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    topk_logprobs: tuple[TopLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The samples of a prompt, and what was asked about the prompt: one entry per token.

    An entry is None where nothing predicts the token, at the first one, and where the token stands for an image.
    """

    sequences: tuple[GeneratedSequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[TopLogprobs | None, ...] | None = None


async def draw_samples(
    ask: Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]],
    prompt: ModelInput,
    params: GenerateParams,
    image_token_id: int,
) -> Generated:
    """Draw `params.n` samples from a server that `ask` posts to.

    Raises `PromptError` for a prompt that cannot be sent, `RequestRejected` with the server's reason if it takes the
    prompt or a parameter as invalid, `SamplingError` if no server answers or the prompt there is another one.
    """

    async def draw(request: dict[str, Any]) -> Sequence[Mapping[str, object]]:
        try:
            return [await ask(request)]
        except RequestRejected as rejected:
            if _TOO_MANY_SAMPLES not in rejected.message:
                raise
        half = request["sampling_params"]["n"] // 2
        first, second = (_with_samples(request, *part) for part in ((0, half), (half, request["sampling_params"]["n"])))
        return [*await draw(first), *await draw(second)]

    requests = await asyncio.to_thread(generate_requests, prompt, params, image_token_id)
    answers = [answer for drawn in await asyncio.gather(*map(draw, requests)) for answer in drawn]
    return await asyncio.to_thread(parse_generated, answers, prompt, params, image_token_id)


async def score_answer(
    ask: Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]],
    prompt: ModelInput,
    answer: Sequence[int],
    temperature: float,
    image_token_id: int,
) -> tuple[float, ...]:
    """The log-probability of each token of an answer, as if it had been sampled; raises as `draw_samples`.

    That of a prompt's token would be the one at temperature 1, so every token is asked for after those before it.
    """
    params = GenerateParams(max_tokens=1, temperature=temperature, topk_logprobs=2)

    async def score(index: int) -> float:
        before = ModelInput(chunks=(*prompt.chunks, EncodedTextChunk(tokens=tuple(answer[:index]))))
        (request,) = await asyncio.to_thread(generate_requests, before, params, image_token_id)
        # twice: the sampled token comes first, and as many are reported as are asked for
        request["sampling_params"] |= {"logprobs": 2, "logprob_token_ids": [answer[index]] * 2}
        reply = await ask(request)
        (sequence,) = (await asyncio.to_thread(parse_generated, [reply], before, params, image_token_id)).sequences
        assert sequence.topk_logprobs is not None
        return dict(sequence.topk_logprobs[0])[answer[index]]

    return tuple(await asyncio.gather(*map(score, range(len(answer)))))


def _with_samples(request: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """The request for the samples from number `first` to `end`."""
    settings = request["sampling_params"]
    seed = settings["seed"]
    return {
        **request,
        "sampling_params": {**settings, "n": end - first, "seed": None if seed is None else seed + first},
    }


def generate_requests(prompt: ModelInput, params: GenerateParams, image_token_id: int) -> list[dict[str, Any]]:
    """The requests for all samples; the first one asks about the prompt. Raises `PromptError`."""
    if not prompt.length:
        raise PromptError("expected a prompt of at least one token, got none")
    if any(image_token_id in chunk.tokens for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk)):
        raise PromptError(
            f"expected no image token ({image_token_id}) among the text tokens, which would stand for an image that is "
            "not there; give each image as a chunk of its own"
        )
    token_ids: list[int] = []
    for chunk in prompt.chunks:
        token_ids += [image_token_id] if isinstance(chunk, ImageChunk) else chunk.tokens
    images = [{"type": "image_url", "url": image.data_url(), "uuid": image.sha256} for image in prompt.images]
    request: dict[str, Any] = {"token_ids": token_ids, "return_token_ids": True, "sampling_params": _settings(params)}
    if images:
        request["content_parts"] = images
    if not params.scores_prompt:
        return [request]
    # vLLM would compute the whole prompt for each of the samples
    scoring = _with_samples(request, 0, 1)
    scoring["sampling_params"]["prompt_logprobs"] = params.topk_prompt_logprobs
    n = request["sampling_params"]["n"]
    return [scoring, _with_samples(request, 1, n)] if n > 1 else [scoring]


def _settings(params: GenerateParams) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "n": 1 if params.temperature == 0.0 else params.n,  # vLLM refuses more, and all would be the same
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignores_end_of_turn,
        "logprobs": params.topk_logprobs + 1 if params.topk_logprobs else 0,  # the token itself takes a place
        "detokenize": bool(params.stop_strings),
        "skip_special_tokens": False,
    }
    if params.max_tokens is not None:
        settings["max_tokens"] = params.max_tokens
    return settings


def parse_generated(
    answers: Sequence[Mapping[str, Any]], prompt: ModelInput, params: GenerateParams, image_token_id: int
) -> Generated:
    """Read the answers to `generate_requests`, in order; raises `SamplingError` if they answer something else."""
    expected = prompt.token_ids(image_token_id)
    try:
        for answer in answers:
            _require_same_prompt(expected, prompt, answer)
        choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda one: one["index"])]
        sequences = tuple(_parse_sequence(choice, params.topk_logprobs) for choice in choices)
        entries: Sequence[Mapping[str, Any] | None] = answers[0]["prompt_logprobs"] or ()
        if params.scores_prompt and len(entries) != len(expected):
            raise SamplingError(f"expected log-probabilities of {len(expected)} prompt tokens, got {len(entries)}")
        scored = [
            (token, None if token == image_token_id else entry) for token, entry in zip(expected, entries, strict=False)
        ]
        logprobs = tuple(None if entry is None else float(entry[str(token)]["logprob"]) for token, entry in scored)
        k = params.topk_prompt_logprobs
        top = tuple(None if entry is None else _top(entry.items(), k) for _, entry in scored)
    except (KeyError, TypeError, ValueError) as error:
        raise SamplingError(
            f"expected tokens with log-probabilities from {GENERATE_PATH}, got {type(error).__name__}: {error}; use a "
            "vLLM of the version that this package installs"
        ) from error
    if params.temperature == 0.0:
        sequences *= params.n
    if len(sequences) != params.n:
        raise SamplingError(f"expected {params.n} samples, got {len(sequences)}")
    return Generated(
        sequences=sequences,
        prompt_logprobs=logprobs if params.prompt_logprobs else None,
        topk_prompt_logprobs=top if params.topk_prompt_logprobs else None,
    )


def _require_same_prompt(expected: Sequence[int], prompt: ModelInput, answer: Mapping[str, Any]) -> None:
    lengths = [mapping(place).get("length") for place in sequence(mapping(answer["mm_placeholders"]).get("image"))]
    if lengths != [chunk.length for chunk in prompt.image_chunks]:
        raise SamplingError(
            f"expected images of {[chunk.length for chunk in prompt.image_chunks]} tokens in the server's prompt, got "
            f"{lengths}; the settings of the image processor differ between the server and this process"
        )
    if (at := first_difference(expected, answer["prompt_token_ids"])) is not None:
        raise SamplingError(f"expected the prompt's own tokens from the server, got others from position {at} on")


def _parse_sequence(choice: Mapping[str, Any], topk: int) -> GeneratedSequence:
    if choice["finish_reason"] not in ("stop", "length"):
        raise SamplingError(f"expected a sample that ends by itself, got {choice['finish_reason']!r}")
    content: Sequence[Mapping[str, Any]] = choice["logprobs"]["content"]
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    if tokens != tuple(entry["token_id"] for entry in content) or min(logprobs, default=0.0) <= _LEAST_LOGPROB:
        raise SamplingError(f"expected a log-probability for each of {len(tokens)} sampled tokens, got {logprobs}")
    tops = [_top([(one["token_id"], one) for one in entry["top_logprobs"]], topk) for entry in content]
    return GeneratedSequence(
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=choice["finish_reason"],
        topk_logprobs=tuple(tops) if topk else None,
    )


def _top(entries: Iterable[tuple[str | int, Mapping[str, Any]]], k: int) -> TopLogprobs:
    """The `k` most likely ones; the token that is there is reported even if it is not among them."""
    ranked = sorted((entry["rank"], int(token), float(entry["logprob"])) for token, entry in entries)
    return tuple((token, logprob) for rank, token, logprob in ranked if rank <= k)[:k]
