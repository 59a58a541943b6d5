"""Do sampler and trainer agree? Their log-probabilities of the same tokens, compared every step before anything is
learned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cua_rl.errors import ParityError
from cua_rl.types import Datum, ImageChunk

LIKELY_CAUSES = (
    "the server serves another adapter than the trainer holds, the image preprocessing differs (resize limits, "
    "patch size), positions of image tokens differ (M-RoPE), the temperature is not applied on one side, or the "
    "precisions differ"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Absolute differences of log-probabilities, nats: over all trained tokens, and by what came before the token."""

    mean_abs: float
    max_abs: float
    text_mean_abs: float | None
    """Tokens with no image before them; None if there are none."""
    image_mean_abs: float | None
    """Tokens with an image before them; None if there are none."""

    def metrics(self) -> dict[str, float]:
        """The differences under their metric names."""
        values: Mapping[str, float | None] = {
            "policy/parity_mean_abs": self.mean_abs,
            "policy/parity_max_abs": self.max_abs,
            "policy/parity_text_mean_abs": self.text_mean_abs,
            "policy/parity_image_mean_abs": self.image_mean_abs,
        }
        return {name: value for name, value in values.items() if value is not None}


def measure_parity(datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]]) -> Parity:
    """Compare `training_logprobs` (per datum, aligned with its tokens) with what the sampler reported."""
    gaps = [gap for datum, row in zip(datums, training_logprobs, strict=True) for gap in _gaps(datum, row)]
    if not gaps:
        raise ValueError("expected at least one trained token to compare, got none")
    text = [gap for gap, after_image in gaps if not after_image]
    image = [gap for gap, after_image in gaps if after_image]
    return Parity(
        mean_abs=sum(gap for gap, _ in gaps) / len(gaps),
        max_abs=max(gap for gap, _ in gaps),
        text_mean_abs=sum(text) / len(text) if text else None,
        image_mean_abs=sum(image) / len(image) if image else None,
    )


def _gaps(datum: Datum, row: Sequence[float]) -> Iterator[tuple[float, bool]]:
    first_image = _first_image_position(datum)
    for position, is_trained in enumerate(datum.loss_mask):
        if is_trained:
            yield abs(datum.sampling_logprobs[position] - row[position]), position > first_image


def _first_image_position(datum: Datum) -> float:
    position = 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, ImageChunk):
            return position
        position += chunk.length
    return float("inf")


def of_version(datum: Datum, policy_version: int | None) -> Datum:
    """The datum with only the turns that this version sampled on its mask; None leaves it as it is.

    Every run of trained tokens is one turn.
    """
    if policy_version is None or set(datum.policy_versions) <= {policy_version}:
        return datum
    mask: list[bool] = []
    versions = iter(datum.policy_versions)
    for is_trained, run in groupby(datum.loss_mask):
        is_kept = is_trained and next(versions) == policy_version
        mask += [is_kept for _ in run]
    return replace(datum, loss_mask=tuple(mask))


def require_parity(parity: Parity, limit: float, *, step: int) -> None:
    """Raise `ParityError` if the mean difference is above `limit` nats (or not a number)."""
    if not parity.mean_abs <= limit:
        raise ParityError(
            f"step {step}: expected sampler and trainer log-probabilities within {limit} nats on average, got "
            f"{parity.mean_abs:.4f} (max {parity.max_abs:.4f}, after images {parity.image_mean_abs}, text only "
            f"{parity.text_mean_abs}); nothing was trained. Likely causes: {LIKELY_CAUSES}. "
            "Set parity_limit if this precision is expected"
        )
