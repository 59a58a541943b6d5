"""Canaries: fixed prompts whose log-probabilities show whether the server applies an adapter.

The text canary is a conversation, sent as tokens. The image canary is a question about an image, which adapters on the
vision tower affect too; the server renders it, so it also detects a prompt that differs from the renderer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from cua_rl.renderers.renderer import Renderer
from cua_rl.types.conversation import EncodedImage, Message, TextPart, ToolCall
from cua_rl.types.errors import AdapterError, ConfigError
from cua_rl.types.rollout import AdapterRef, Datum, EncodedTextChunk, ModelInput

_PART_OF_CHANGE = 0.1
"""Share of the adapter's effect that may be missing beyond rounding; one module without its update exceeds it."""
CANARY = (
    Message(
        role="user", content=(TextPart(text="Open the settings, find the network page and switch the radio off."),)
    ),
    ToolCall(call_id="canary", name="click", arguments='{"x": 500, "y": 125}'),
)
IMAGE_QUESTION = "Name the colours from left to right, then the row of the brightest square, and say where to click."


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Conditions on the server's log-probabilities of `tokens` under which an adapter counts as served."""

    tokens: tuple[int, ...]
    """All tokens of the text canary; of the image canary, those after the image."""
    image: EncodedImage | None = None
    changes_model: bool
    """Whether the adapter's update is non-zero according to the trainer; a fresh adapter changes nothing."""
    training_logprobs: tuple[float, ...] | None = None
    """The trainer's log-probabilities with this adapter, one per token; the first is ignored."""
    training_base_logprobs: tuple[float, ...] | None = None
    """The trainer's log-probabilities with the base model; given if `training_logprobs` are."""
    limit: float = 0.05
    """Mean absolute difference from the trainer that rounding explains, nats."""
    min_change: float = 1e-7
    """Minimum mean absolute difference from the base model that counts as a change, nats."""


def canary_tokens(renderer: Renderer) -> tuple[int, ...]:
    """The canary's conversation as tokens, in the chat format of the model."""
    rendered, _ = renderer.render_supervised(CANARY)
    return tuple(rendered.token_ids(renderer.image_token_id))


def text_canary(renderer: Renderer) -> ModelInput:
    return ModelInput(chunks=(EncodedTextChunk(tokens=canary_tokens(renderer)),))


def image_canary(renderer: Renderer) -> ModelInput:
    """The canary's question about an image of irregularly coloured squares, as a prompt."""
    side = 256  # 64 tokens of 32 x 32 pixels; models scale smaller images up
    picture = Image.frombytes("RGB", (8, 8), bytes((index * 167 + index * index * 29) % 256 for index in range(192)))
    encoded = BytesIO()
    picture.resize((side, side), Image.Resampling.NEAREST).save(encoded, "PNG")
    image = EncodedImage(data=encoded.getvalue(), format="png", width_px=side, height_px=side)
    return renderer.render((Message(role="user", content=(image, TextPart(text=IMAGE_QUESTION))),), ())


def require_canary_room(renderer: Renderer, max_model_len: int) -> None:
    """Raise `ConfigError` if a server of this context could not score the canaries."""
    needed = 1 + max(image_canary(renderer).length, len(canary_tokens(renderer)))
    if max_model_len < needed:
        raise ConfigError(
            f"server.max_model_len: expected at least {needed}, for the prompt that proves adapters, got "
            f"{max_model_len}; raise it"
        )


def scored_tokens(prompt: ModelInput) -> tuple[int, ...]:
    """The tokens of a canary's prompt whose log-probabilities are compared, and the one before them."""
    last = prompt.chunks[-1]
    assert isinstance(last, EncodedTextChunk), f"expected a prompt that ends with text, got {last!r}"
    return last.tokens


def canary_datum(prompt: ModelInput) -> Datum:
    """The canary as a datum, for the trainer's log-probabilities."""
    zeros = (0.0,) * prompt.length
    num_scored = len(scored_tokens(prompt)) - 1
    return Datum(
        rollout_id="canary",
        model_input=prompt,
        loss_mask=(*[False] * (prompt.length - num_scored), *[True] * num_scored),
        advantages=zeros,
        sampling_logprobs=zeros,
        policy_versions=(),
    )


def canary_request(canary: Canary) -> tuple[str, dict[str, object]]:
    """Path and body of the request for the prompt's log-probabilities, without the name of the model."""
    body = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "add_special_tokens": False}
    if canary.image is None:
        return "/v1/completions", {**body, "prompt": list(canary.tokens)}
    image = {"type": "image_url", "image_url": {"url": canary.image.data_url()}}
    content = [image, {"type": "text", "text": IMAGE_QUESTION}]
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}


def parse_canary(body: Mapping[str, Any], canary: Canary) -> tuple[float, ...]:
    """Log-probabilities of all the canary's tokens but the first; raises `AdapterError` for another prompt."""
    answer = body["choices"][0] if canary.image is None else body
    given: Sequence[Mapping[str, Mapping[str, float]] | None] = answer["prompt_logprobs"]
    scored = list(zip(canary.tokens[1:], given[-len(canary.tokens) + 1 :], strict=True))
    if any(entry is None or str(token) not in entry for token, entry in scored):
        raise AdapterError(
            "expected the canary's prompt from the server as the renderer writes it, got other tokens: their chat "
            "templates differ; set renderer_name to the one that fits the model"
        )
    return tuple(entry[str(token)]["logprob"] for token, entry in scored if entry is not None)


def check_canary(
    adapter: AdapterRef, canary: Canary, *, served: Sequence[float], base: Sequence[float]
) -> tuple[float, float | None]:
    """Compare the server's log-probabilities under the adapter with the base model's and the trainer's.

    The comparison with the trainer is of the adapter's effect: its log-probabilities minus the base model's. In half
    precision, the log-probabilities themselves differ by more than a training step changes them.

    Returns the mean absolute change from the base model and, if the canary has the trainer's numbers, the mean absolute
    difference between the server's change and the trainer's.

    Raises:
        AdapterError: the adapter does not change the model although it should, or not as in the trainer; or the base
            models differ.
    """
    change = _mean_abs_difference(served, base)
    if canary.changes_model and not change >= canary.min_change:  # so that no number fails, here and below
        raise AdapterError(
            f"expected adapter {adapter.name!r} to change the canary's log-probabilities, got a mean difference of "
            f"{change:.2e} from the base model: its keys match no module of the served model, or it was loaded with "
            f"scale 0; compare the names in {adapter.path / 'adapter_model.safetensors'} with the model's modules"
        )
    if canary.training_logprobs is None or canary.training_base_logprobs is None:
        return change, None
    trained, trained_base = canary.training_logprobs[1:], canary.training_base_logprobs[1:]
    base_difference = _mean_abs_difference(base, trained_base)
    if not base_difference <= canary.limit:
        raise AdapterError(
            f"expected the server's base model to give the trainer's log-probabilities within {canary.limit}, got a "
            f"mean difference of {base_difference:.3f}: another base model, or another precision"
        )
    wanted = _mean_abs_difference(trained, trained_base)
    difference = _mean_abs_difference(
        [one - other for one, other in zip(served, base, strict=True)],
        [one - other for one, other in zip(trained, trained_base, strict=True)],
    )
    limit = canary.limit + _PART_OF_CHANGE * wanted
    if not difference <= limit:
        raise AdapterError(
            f"expected adapter {adapter.name!r} to change the canary's log-probabilities as in the trainer, by "
            f"{wanted:.3f}, within {limit:.3f}; got {change:.3f}, with a mean difference of {difference:.3f}: "
            "another adapter than the trainer's, only some of its keys applied, or a wrong lora_alpha / rank"
        )
    return change, difference


def _mean_abs_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
