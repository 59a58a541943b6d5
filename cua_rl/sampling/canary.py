"""The canary: a fixed text whose log-probabilities show whether the server applies an adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from cua_rl.errors import AdapterError
from cua_rl.model_input import EncodedTextChunk, ModelInput
from cua_rl.policy import AdapterRef
from cua_rl.renderers.renderer import Renderer
from cua_rl.types import Datum

CANARY_TEXT = (
    "<|im_start|>user\nOpen the settings, find the network page and switch the radio off.<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "click", "arguments": {"x": 500, "y": 125}}\n</tool_call><|im_end|>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Conditions on the server's log-probabilities of `tokens` under which an adapter counts as served."""

    tokens: tuple[int, ...]
    changes_model: bool
    """Whether the adapter's update is non-zero according to the trainer; a fresh adapter changes nothing."""
    training_logprobs: tuple[float, ...] | None = None
    """The trainer's log-probabilities with this adapter, one per token; the first is ignored."""
    limit: float = 0.05
    """Maximum mean absolute difference from the trainer, nats."""
    min_change: float = 1e-7
    """Minimum mean absolute difference from the base model that counts as a change, nats."""


def canary_tokens(renderer: Renderer) -> tuple[int, ...]:
    """The canary's text as tokens of the model."""
    return tuple(renderer.encode(CANARY_TEXT))


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

    Returns the mean absolute differences from the base model and, if the canary has its numbers, from the trainer.

    Raises:
        AdapterError: the adapter does not change the model although it should, or differs from the trainer's.
    """
    change = _mean_abs_difference(served, base)
    if canary.changes_model and change < canary.min_change:
        raise AdapterError(
            f"expected adapter {adapter.name!r} to change the canary's log-probabilities, got a mean difference of "
            f"{change:.2e} from the base model: its keys match no module of the served model, or it was loaded with "
            f"scale 0; compare the names in {adapter.path / 'adapter_model.safetensors'} with the model's modules"
        )
    if canary.training_logprobs is None:
        return change, None
    difference = _mean_abs_difference(served, canary.training_logprobs[1:])
    if difference > canary.limit:
        raise AdapterError(
            f"expected adapter {adapter.name!r} to give the trainer's log-probabilities within {canary.limit}, got a "
            f"mean difference of {difference:.3f} (and {change:.3f} from the base model): another adapter than the "
            f"trainer's, only some of its keys applied, a wrong lora_alpha / rank, or another base model"
        )
    return change, difference


def _mean_abs_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
