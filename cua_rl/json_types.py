"""Values from JSON, which no type describes."""

import json
from collections.abc import Mapping
from typing import Any, cast

Json = Mapping[str, object]
"""A JSON object from outside, whose values are unknown."""
JsonDict = dict[str, Any]
"""A JSON object that is being built, or a column of one."""


def as_number(value: object, *, largest: float) -> float | None:
    """A number from -largest to largest; booleans do not count, and Python reads NaN and integers of any size."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= largest:
        return None
    return float(value)


def mapping(value: object) -> Json:
    """The value if it is a JSON object, else an empty one."""
    return cast("Json", value) if isinstance(value, Mapping) else {}


def parse_json(body: bytes) -> object:
    """The value of an answer's body; None if it is not JSON."""
    try:
        return cast("object", json.loads(body))
    except ValueError:
        return None
