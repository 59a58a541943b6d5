"""Requests to vLLM's Responses API with tokens and log-probabilities, and the parsing of its answers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from cua_rl.renderers.openai_items import responses_input, responses_tools
from cua_rl.sampling.known_images import name_images
from cua_rl.sampling.sampler import Sampled
from cua_rl.types.conversation import Item, Tool
from cua_rl.types.errors import SamplingError
from cua_rl.types.rollout import Chunk, EncodedTextChunk, ModelInput, SamplingParams

RESPONSES_PATH = "/v1/responses"


def sampling_request(
    items: Sequence[Item], tools: Sequence[Tool], params: SamplingParams, ends: Sequence[int] = ()
) -> dict[str, object]:
    """A request to sample unmodified and report every token; the end of turn is text, which vLLM needs for logprobs.

    `ends` are the tokens that end an answer that is held to a grammar. The request's images are objects: `HttpClient`
    encodes those that `KnownImages` does not leave out.
    """
    conversation = responses_input(items, lambda image: image)
    name_images(conversation)
    held = {"structured_outputs": {"structural_tag": params.grammar}, "stop_token_ids": list(ends)}
    return {
        **(held if params.grammar else {}),
        "input": conversation,
        "tools": responses_tools(tools),
        "temperature": params.temperature,
        "max_output_tokens": params.max_tokens,
        "stop": list(params.stops),
        "seed": params.seed,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "store": False,
        "enable_response_messages": True,
        "include": ["message.output_text.logprobs"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def parse_sampled(body: Mapping[str, Any]) -> Sampled:
    """Read token ids and log-probabilities; raises `SamplingError` if they are missing or inconsistent."""
    try:
        tokens = tuple(_token_ids(body["output_messages"]))
        output: Sequence[Mapping[str, Any]] = body["output"]
        parts = [part for item in output for part in item["content"]]
        logprobs = tuple(float(entry["logprob"]) for part in parts for entry in part["logprobs"])
        prompt_ids = tuple(_token_ids(body["input_messages"]))
        cached_tokens = int(body["usage"]["input_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise SamplingError(
            f"expected token ids and log-probabilities in the model server's answer, got {type(error).__name__}: "
            f"{error}; use a vLLM that knows enable_response_messages, without tool or reasoning parsers"
        ) from error
    if tokens and not logprobs and not parts:
        raise SamplingError(
            f"expected an answer with some text, got {len(tokens)} tokens without text, for which vLLM gives no "
            "log-probabilities; the model was sampled from outside its vocabulary, or max_tokens is too small"
        )
    if len(tokens) != len(logprobs):
        raise SamplingError(
            f"expected one log-probability for each of {len(tokens)} sampled tokens, got {len(logprobs)}; "
            "start the model server without tool and reasoning parsers"
        )
    return Sampled(
        prompt_ids=prompt_ids,
        tokens=tokens,
        logprobs=logprobs,
        is_complete=body["status"] == "completed",
        cached_tokens=cached_tokens,
    )


def _token_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    return chain.from_iterable(message["tokens"] for message in messages)


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """The first position at which two token sequences differ; None if they are equal."""
    if len(expected) == len(actual) and list(expected) == list(actual):
        return None
    pairs = zip(expected, actual, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


def rebuild_prompt(prompt_ids: Sequence[int], rendered: ModelInput, image_token_id: int) -> ModelInput:
    """The prompt from token ids and the images sent; raises `SamplingError` unless each image is one run of tokens."""
    sent = rendered.image_chunks
    images = iter(sent)
    chunks: list[Chunk] = []
    for is_image, run in groupby(prompt_ids, lambda token: token == image_token_id):
        tokens = tuple(run)
        if not is_image:
            chunks.append(EncodedTextChunk(tokens=tokens))
            continue
        image = next(images, None)
        if image is None or image.length != len(tokens):
            raise SamplingError(
                f"expected {[chunk.length for chunk in sent]} image tokens in the server's prompt, got "
                f"a run of {len(tokens)}; the model's preprocessor settings differ between server and renderer"
            )
        chunks.append(image)
    if next(images, None) is not None:
        raise SamplingError(f"expected {len(sent)} images in the server's prompt, got fewer")
    return ModelInput(chunks=tuple(chunks))
