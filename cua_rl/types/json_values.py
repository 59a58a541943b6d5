"""Narrows values from JSON, whose types are unknown."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Json = Mapping[str, object]
"""A JSON object from outside, whose values are unknown."""
JsonDict = dict[str, Any]
"""A JSON object that is being built, or a column of one."""
_PLAIN, _ARRAYS = (str, int, float, type(None)), (list, tuple)


def is_object(value: object) -> TypeGuard[Json]:
    """Whether a value is a JSON object, whose keys are text."""
    # most values are not objects, and checking against the abstract class takes ten times as long
    return isinstance(value, dict) or (not isinstance(value, _PLAIN) and isinstance(value, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value is a JSON array."""
    return isinstance(value, _ARRAYS)


def mapping(value: object) -> Json:
    """The value if it is a JSON object, else an empty one."""
    return value if is_object(value) else {}


def sequence(value: object) -> Sequence[object]:
    """The value if it is a JSON array, else an empty one."""
    return value if is_array(value) else ()


def as_number(value: object, *, largest: float) -> float | None:
    """A number from -largest to largest; booleans do not count, and Python reads NaN and integers of any size."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= largest:
        return None
    return float(value)


def parse_json(body: bytes) -> object:
    """The value of an answer's body; None if it is not JSON."""
    try:
        value: object = json.loads(body)
    except ValueError:
        return None
    return value
