"""Numbers as the API returns them: rates with intervals, finite values, thinned series."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import fsum, isfinite
from typing import Any

from sqlalchemy import Row

from cua_rl.database.models import Base, TaskRow
from cua_rl.evaluation.statistics import TaskSums, independent_sums
from cua_rl.monitor import schemas
from cua_rl.types.json_values import mapping, sequence


@lru_cache(maxsize=2**16)
def make_rate(sums: TaskSums) -> schemas.Rate:
    """The success rate that follows from these sums; steps that have ended are shown again and again."""
    low, high = sums.interval
    return schemas.Rate(
        num_successes=int(sums.num_successes),
        num_rollouts=int(sums.num_attempts),
        rate=sums.rate,
        low=low,
        high=high,
        num_independent=sums.num_independent,
        num_lost_tasks=int(sums.num_lost),
    )


def make_task_rate(sums: TaskSums, num_instances: int) -> schemas.Rate:
    """The success rate over instances of one task; if it has a single one, of that: its attempts are independent."""
    return make_rate(sums if num_instances > 1 else independent_sums(sums.num_successes, sums.num_attempts))


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


def curve_ends(config: Mapping[str, Any]) -> list[int]:
    """Steps after which a run was resumed with settings that begin a new curve."""
    entries = map(mapping, sequence(config.get("changed")))
    ends = [one.get("after_step") for one in entries if one.get("begins_curve") is True]
    return [end for end in ends if isinstance(end, int)]


def columns(row: Base | Row[*tuple[Any, ...]], **others: Any) -> dict[str, Any]:
    """What a row holds, for a response with fields of these names, and `others`; non-finite numbers are None."""
    held = vars(row) if isinstance(row, Base) else row._asdict()  # pyright: ignore[reportPrivateUsage]  # a public method of SQLAlchemy
    return {name: finite(value) if isinstance(value, float) else value for name, value in held.items()} | others


def task_fields(task: TaskRow | None) -> dict[str, Any]:
    """The description of a task; its definition is unknown to runs that another system sent."""
    names = ("instruction", "category", "difficulty", "max_turns")
    return {**dict.fromkeys(names), "tags": []} if task is None else columns(task)


def finite(value: object) -> float | None:
    """A finite number, or None."""
    try:
        return float(value) if isinstance(value, int | float) and isfinite(value) else None
    except OverflowError:  # an integer with hundreds of digits
        return None


def finite_mean(values: Sequence[float]) -> float | None:
    """The mean of some values, None if there are none or it is not finite."""
    try:
        return finite(fsum(values) / len(values)) if values else None
    except (OverflowError, ValueError):  # of infinite ones
        return None


def finite_values(values: object) -> dict[str, float | None]:
    """Metrics with None for non-finite values."""
    return {name: finite(value) for name, value in mapping(values).items()}


def thin(values: Sequence[float | None], num_points: int) -> list[float | None]:
    """Means of equal stretches, at most `num_points` of them: [1, 0, 1, 1] at 2 points is [0.5, 1]."""
    if len(values) <= num_points:
        return list(values)
    edges = [round(index * len(values) / num_points) for index in range(num_points + 1)]
    stretches = [[value for value in values[a:b] if value is not None] for a, b in pairwise(edges)]
    return [sum(stretch) / len(stretch) if stretch else None for stretch in stretches]
