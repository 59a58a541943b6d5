"""Values from JSON, which no type describes."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, object]
"""A JSON object from outside, whose values are unknown."""
JsonDict = dict[str, Any]
"""A JSON object that is being built, or a column of one."""


def as_number(value: object, *, largest: float) -> float | None:
    """A number from -largest to largest; booleans do not count, and Python reads NaN and integers of any size."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= largest:
        return None
    return float(value)
