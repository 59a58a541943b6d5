"""The canary: a fixed conversation whose log-probabilities show whether the server applies an adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from cua_rl.conversation import Message, TextPart, ToolCall
from cua_rl.errors import AdapterError
from cua_rl.model_input import EncodedTextChunk, ModelInput
from cua_rl.policy import AdapterRef
from cua_rl.renderers.renderer import Renderer
from cua_rl.types import Datum

_PART_OF_CHANGE = 0.1
"""How much of the adapter's effect may be missing beside rounding: one module of many without its update is more."""
CANARY = (
    Message(
        role="user",
        content=(TextPart(text="Open the settings, find the network page and switch the radio off."),),
    ),
    ToolCall(call_id="canary", name="click", arguments='{"x": 500, "y": 125}'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Conditions on the server's log-probabilities of `tokens` under which an adapter counts as served."""

    tokens: tuple[int, ...]
    changes_model: bool
    """Whether the adapter's update is non-zero according to the trainer; a fresh adapter changes nothing."""
    training_logprobs: tuple[float, ...] | None = None
    """The trainer's log-probabilities with this adapter, one per token; the first is ignored."""
    training_base_logprobs: tuple[float, ...] | None = None
    """The trainer's with the base model; given if `training_logprobs` are."""
    limit: float = 0.05
    """Mean absolute difference from the trainer that rounding explains, nats."""
    min_change: float = 1e-7
    """Minimum mean absolute difference from the base model that counts as a change, nats."""


def canary_tokens(renderer: Renderer) -> tuple[int, ...]:
    """The canary's conversation as tokens, in the chat format of the model."""
    rendered, _ = renderer.render_supervised(CANARY)
    return tuple(rendered.token_ids(renderer.image_token_id))


def canary_datum(tokens: Sequence[int]) -> Datum:
    """The canary as a datum, for the trainer's log-probabilities."""
    chunk = EncodedTextChunk(tokens=tuple(tokens))
    zeros = (0.0,) * len(tokens)
    return Datum(
        rollout_id="canary",
        model_input=ModelInput(chunks=(chunk,)),
        loss_mask=(False, *[True] * (len(tokens) - 1)),
        advantages=zeros,
        sampling_logprobs=zeros,
        policy_versions=(),
    )


def canary_request(canary: Canary) -> dict[str, object]:
    """The body of a Completions request for the prompt's log-probabilities, without the model."""
    return {
        "prompt": list(canary.tokens),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }


def parse_canary(body: Mapping[str, object], canary: Canary) -> tuple[float, ...]:
    """Log-probabilities of the canary's tokens except the first, from the server's answer."""
    choices = cast("Sequence[Mapping[str, object]]", body["choices"])
    given = cast("Sequence[Mapping[str, Mapping[str, float]] | None]", choices[0]["prompt_logprobs"])
    return tuple(
        entry[str(token)]["logprob"] for token, entry in zip(canary.tokens, given, strict=True) if entry is not None
    )


def check_canary(
    adapter: AdapterRef, canary: Canary, *, served: Sequence[float], base: Sequence[float]
) -> tuple[float, float | None]:
    """Compare the server's log-probabilities under the adapter with the base model's and the trainer's.

    What counts is the adapter's effect: its log-probabilities minus the base model's, here and in the trainer. In half
    precision, the log-probabilities alone differ by more than a training step changes them.

    Returns the mean absolute change from the base model and, if the canary has the trainer's numbers, the mean absolute
    difference between the server's change and the trainer's.

    Raises:
        AdapterError: the adapter does not change the model although it should, or not as in the trainer; or the base
            models differ.
    """
    change = _mean_abs_difference(served, base)
    if canary.changes_model and change < canary.min_change:
        raise AdapterError(
            f"expected adapter {adapter.name!r} to change the canary's log-probabilities, got a mean difference of "
            f"{change:.2e} from the base model: its keys match no module of the served model, or it was loaded with "
            f"scale 0; compare the names in {adapter.path / 'adapter_model.safetensors'} with the model's modules"
        )
    if canary.training_logprobs is None or canary.training_base_logprobs is None:
        return change, None
    trained, trained_base = canary.training_logprobs[1:], canary.training_base_logprobs[1:]
    base_difference = _mean_abs_difference(base, trained_base)
    if base_difference > canary.limit:
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
    if difference > limit:
        raise AdapterError(
            f"expected adapter {adapter.name!r} to change the canary's log-probabilities as in the trainer, by "
            f"{wanted:.3f}, within {limit:.3f}; got {change:.3f}, with a mean difference of {difference:.3f}: "
            "another adapter than the trainer's, only some of its keys applied, or a wrong lora_alpha / rank"
        )
    return change, difference


def _mean_abs_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
