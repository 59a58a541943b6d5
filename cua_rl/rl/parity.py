"""Do sampler and trainer agree? Their log-probabilities of the same tokens, compared every step before anything is
learned.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Mean absolute differences of log-probabilities, nats: over all trained tokens, and by what the token answers.

    Images: a turn whose prompt adds a new image to what the model has seen depends on image preprocessing and vision
    tower most of all; a turn that answers text alone (an error message, say) leans on the same images only through
    attention. First tokens: an answer's first token follows the prompt directly, and differences of the two sides'
    kernels show there first; later tokens follow what was sampled. None: there are no such tokens.
    """

    mean_abs: float
    max_abs: float
    text_mean_abs: float | None
    """Turns that answer text alone."""
    image_mean_abs: float | None
    """Turns that answer a new image."""
    first_token_mean_abs: float | None
    later_token_mean_abs: float | None

    def metrics(self) -> dict[str, float]:
        """The differences under their metric names."""
        values: Mapping[str, float | None] = {
            "policy/parity_mean_abs": self.mean_abs,
            "policy/parity_max_abs": self.max_abs,
            "policy/parity_text_mean_abs": self.text_mean_abs,
            "policy/parity_image_mean_abs": self.image_mean_abs,
            "policy/parity_first_token_mean_abs": self.first_token_mean_abs,
            "policy/parity_later_token_mean_abs": self.later_token_mean_abs,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    size: float
    after_image: bool
    is_first: bool


def measure_parity(datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]]) -> Parity:
    """Compare `training_logprobs` (per datum, aligned with its tokens) with what the sampler reported."""
    gaps = [gap for datum, row in zip(datums, training_logprobs, strict=True) for gap in _gaps(datum, row)]
    overall = _mean_size(gaps)
    if overall is None:
        raise ValueError("expected at least one trained token to compare, got none")
    return Parity(
        mean_abs=overall,
        max_abs=max(gap.size for gap in gaps),
        text_mean_abs=_mean_size(gap for gap in gaps if not gap.after_image),
        image_mean_abs=_mean_size(gap for gap in gaps if gap.after_image),
        first_token_mean_abs=_mean_size(gap for gap in gaps if gap.is_first),
        later_token_mean_abs=_mean_size(gap for gap in gaps if not gap.is_first),
    )


def _mean_size(gaps: Iterable[_Gap]) -> float | None:
    sizes = [gap.size for gap in gaps]
    return sum(sizes) / len(sizes) if sizes else None


def _gaps(datum: Datum, row: Sequence[float]) -> Iterator[_Gap]:
    """Every run of trained tokens is one turn, and answers what came since the run before."""
    image_positions = _image_positions(datum)
    after_image, last_end = False, 0
    for position, is_trained in enumerate(datum.loss_mask):
        if not is_trained:
            continue
        is_first = not datum.loss_mask[position - 1]
        if is_first:
            after_image = any(last_end <= image < position for image in image_positions)
        last_end = position + 1
        size = abs(datum.sampling_logprobs[position] - row[position])
        yield _Gap(size=size, after_image=after_image, is_first=is_first)


def _image_positions(datum: Datum) -> list[int]:
    """Where images begin."""
    positions, position = list[int](), 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, ImageChunk):
            positions.append(position)
        position += chunk.length
    return positions


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
    if parity.mean_abs <= limit:
        return
    parts = {
        "answers to new images": parity.image_mean_abs,
        "to text alone": parity.text_mean_abs,
        "first tokens": parity.first_token_mean_abs,
    }
    details = ", ".join(f"{name} {value:.4f}" for name, value in parts.items() if value is not None)
    raise ParityError(
        f"step {step}: expected sampler and trainer log-probabilities within {limit} nats on average, got "
        f"{parity.mean_abs:.4f} (max {parity.max_abs:.4f}, {details}); nothing was trained. "
        f"Likely causes: {LIKELY_CAUSES}. Set parity_limit if this precision is expected"
    )
