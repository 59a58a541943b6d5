"""A training step in several optimizer steps: who is in which, and metrics of all of them as one."""

from collections.abc import Mapping, Sequence
from random import Random

from cua_rl.types import Datum

_COUNTS = frozenset(
    {
        "optim/num_datums",
        "optim/num_micro_batches",
        "optim/trained_tokens",
        "optim/total_tokens",
        "optim/encoded_images",
    }
)


def deal_datums(datums: Sequence[Datum], num_parts: int, seed: str) -> list[list[int]]:
    """Deal datums to at most `num_parts` parts: the indices of each part, ascending.

    Datums of one rollout stay together. Of every `num_parts` rollouts that follow each other each part gets one, drawn
    by `seed`: so the rollouts of a group are spread over the parts, and sizes differ by one rollout at most.
    """
    members = list(dict.fromkeys(datum.member for datum in datums))
    rng = Random(seed)
    part_of: dict[tuple[str, str], int] = {}
    for start in range(0, len(members), num_parts):
        order = rng.sample(range(num_parts), num_parts)
        part_of |= zip(members[start : start + num_parts], order, strict=False)
    parts = [
        [index for index, datum in enumerate(datums) if part_of[datum.member] == part] for part in range(num_parts)
    ]
    return [part for part in parts if part]


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a whole step from those of its parts.

    Counts add up; extremes stay extreme, and the 99th percentile counts as one; everything else is a mean, weighted by
    `optim/trained_tokens`.
    """
    if len(parts) == 1:
        return dict(parts[0])
    weights = [part.get("optim/trained_tokens", 1.0) for part in parts]
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        present = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        combined[name] = _combine(name, [value for value, _ in present], [weight for _, weight in present])
    return combined


def _combine(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if name in _COUNTS:
        return sum(values)
    if name.endswith(("max", "_p99")):
        return max(values)
    if name.endswith("min"):
        return min(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
