"""Numbers as the API returns them: rates with intervals, finite values, thinned series."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from cua_rl.evaluation.statistics import wilson_interval
from cua_rl.monitor import schemas


def make_rate(num_successes: float | None, num_rollouts: float | None) -> schemas.Rate:
    """A success rate with its interval."""
    successes, rollouts = int(num_successes or 0), int(num_rollouts or 0)
    low, high = wilson_interval(successes, rollouts)
    rate = successes / rollouts if rollouts else None
    return schemas.Rate(num_successes=successes, num_rollouts=rollouts, rate=rate, low=low, high=high)


def fault_bounds(metrics: Mapping[str, Any] | None) -> schemas.FaultBounds | None:
    """Bounds that faults leave for an evaluation's success; None without faults."""
    found = metrics or {}
    suite = next(
        (name.removesuffix("success_rate_worst") for name in found if name.endswith("/success_rate_worst")), ""
    )
    worst, best = (finite(found.get(f"{suite}success_rate_{end}")) for end in ("worst", "best"))
    if worst is None or best is None:
        return None
    num_faults = finite(found.get(f"{suite}num_faults")) or 0
    return schemas.FaultBounds(num_faults=int(num_faults), worst=worst, best=best)


def finite(value: object) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def finite_values(values: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics with None for non-finite values."""
    return {name: finite(value) for name, value in (values or {}).items()}


def thin(values: Sequence[float | None], num_points: int) -> list[float | None]:
    """Means of equal stretches, at most `num_points` of them: [1, 0, 1, 1] at 2 points is [0.5, 1]."""
    if len(values) <= num_points:
        return list(values)
    edges = [round(index * len(values) / num_points) for index in range(num_points + 1)]
    stretches = [[value for value in values[a:b] if value is not None] for a, b in pairwise(edges)]
    return [sum(stretch) / len(stretch) if stretch else None for stretch in stretches]
