"""Numbers of a configuration against their limits."""

from collections.abc import Mapping
from types import MappingProxyType

NO_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType({})


def check_numbers(
    config: object, smallest: Mapping[str, float], ranges: Mapping[str, tuple[float, float]] = NO_RANGES
) -> None:
    """Raises `ValueError` for the first setting below its smallest value or outside its range; None is always right."""
    for name, least in smallest.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value!r}; set {name}={least} or more")
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low < value <= high:
            raise ValueError(f"{name}: expected a number above {low} and at most {high}, got {value!r}; change {name}")
