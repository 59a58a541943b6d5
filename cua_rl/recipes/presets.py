"""Presets: values instead of defaults because of what else is set, the same in Python and on a command line."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

Config = TypeVar("Config")

Given = Mapping[str, object]
"""The settings that somebody wrote, by name."""


def with_presets(find_presets: Callable[[Given], Given]) -> Callable[[type[Config]], type[Config]]:
    """Decorate a chz class: what is not given is taken from `find_presets(given)` before it is the field's default.

    Command lines build the class with what they say, so both ways there is one place that decides.
    """

    def decorate(config_class: type[Config]) -> type[Config]:
        construct: Callable[..., None] = config_class.__init__

        @wraps(construct)
        def construct_with_presets(self: Config, **given: Any) -> None:
            construct(self, **({**find_presets(given), **given}))

        config_class.__init__ = construct_with_presets  # pyrefly: ignore[method-assign]
        return config_class

    return decorate
