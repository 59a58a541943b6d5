"""JSON objects, whose values no type describes."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, object]
"""A JSON object from outside, whose values are unknown."""
JsonDict = dict[str, Any]
"""A JSON object that is being built, or a column of one."""
