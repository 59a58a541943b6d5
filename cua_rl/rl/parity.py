"""The parity gate: log-probabilities of sampler and trainer for the same tokens, compared before each update."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, count, groupby

from cua_rl.types.errors import ParityError
from cua_rl.types.rollout import Datum, ImageChunk

LIKELY_CAUSES = (
    "the server serves another adapter than the trainer holds, the image preprocessing differs (resize limits, "
    "patch size), positions of image tokens differ (M-RoPE), the temperature is not applied on one side, or the "
    "precisions differ"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Mean absolute differences of log-probabilities, nats: over all trained tokens, and by kind of token.

    Images: a turn whose prompt adds a new image depends most on image preprocessing and the vision tower; a turn after
    text alone (an error message, say) depends on earlier images only through attention. First tokens: an answer's first
    token directly follows the prompt, where kernel differences between the two sides show first; later tokens follow
    sampled ones. None: there are no such tokens.
    """

    mean_abs: float
    max_abs: float
    text_mean_abs: float | None
    """Turns after text alone."""
    image_mean_abs: float | None
    """Turns after a new image."""
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


def measure_parity(
    datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]], policy_version: int | None = None
) -> Parity:
    """Compare `training_logprobs` (per datum, aligned with its tokens) with what the sampler reported.

    Each run of trained tokens is one turn, which answers what came since the previous run, of whatever version. Only
    turns of `policy_version` count (None: all).
    """
    sizes: list[float] = []
    of_kind = defaultdict[str, list[float]](list)
    for datum, row in zip(datums, training_logprobs, strict=True):
        chunks = datum.model_input.chunks
        starts = accumulate((chunk.length for chunk in chunks), initial=0)  # and the end, which no chunk pairs with
        images = [start for chunk, start in zip(chunks, starts, strict=False) if isinstance(chunk, ImageChunk)]
        after_image, last_end = False, 0
        is_compared = of_version(datum, policy_version).loss_mask
        for position in compress(count(), datum.loss_mask):
            is_first = not datum.loss_mask[position - 1]
            if is_first:
                after_image = any(last_end <= image < position for image in images)
            last_end = position + 1
            if is_compared[position]:
                sizes.append(abs(datum.sampling_logprobs[position] - row[position]))
                of_kind["image" if after_image else "text"].append(sizes[-1])
                of_kind["first_token" if is_first else "later_token"].append(sizes[-1])
    if not sizes:
        raise ValueError("expected at least one trained token to compare, got none")
    return Parity(
        mean_abs=sum(sizes) / len(sizes),
        max_abs=max(sizes),
        text_mean_abs=_mean(of_kind["text"]),
        image_mean_abs=_mean(of_kind["image"]),
        first_token_mean_abs=_mean(of_kind["first_token"]),
        later_token_mean_abs=_mean(of_kind["later_token"]),
    )


def _mean(sizes: Sequence[float]) -> float | None:
    return sum(sizes) / len(sizes) if sizes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGate:
    """Compares the turns of a step that the trainer's current weights sampled."""

    limit: float
    step: int
    replayed_ids: Collection[str] = ()
    """Rollouts to leave out: an earlier policy sampled them."""
    policy_version: int | None = None
    """Only turns of this version are compared; None compares all."""

    def check(self, datums: Sequence[Datum], rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics of the comparison, nothing if there is no turn to compare; raises `ParityError`."""
        fresh, fresh_rows = choose_datums(datums, rows, lambda datum: datum.rollout_id not in self.replayed_ids)
        if not any(of_version(datum, self.policy_version).num_trained_tokens for datum in fresh):
            return {}
        parity = measure_parity(fresh, fresh_rows, self.policy_version)
        require_parity(parity, self.limit, step=self.step)
        return parity.metrics()


def choose_datums(
    datums: Sequence[Datum], rows: Sequence[Sequence[float]], is_wanted: Callable[[Datum], bool]
) -> tuple[list[Datum], list[Sequence[float]]]:
    """The datums that satisfy `is_wanted`, and their rows."""
    chosen = [(datum, row) for datum, row in zip(datums, rows, strict=True) if is_wanted(datum)]
    return [datum for datum, _ in chosen], [row for _, row in chosen]


def of_version(datum: Datum, policy_version: int | None) -> Datum:
    """The datum with only turns of this version on its mask (a run of trained tokens is a turn); None keeps all."""
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
