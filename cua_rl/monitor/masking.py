"""Masks secrets in configurations: runs mask their own, other programs may not."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|access_?key|private_?key|(?<!image_)token|secret|password|passwd|pwd|credentials?|authorization)$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(@)")
_BEARER = re.compile(r"(bearer\s+)\S+", re.IGNORECASE)


def mask_secrets(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration with passwords in URLs, and values of settings with names like `api_key`, replaced by ***."""
    return {name: _masked(name, value) for name, value in config.items()}


def _masked(name: str, value: object) -> object:
    match value:
        case str():
            if value and _SECRET_NAME.search(name):
                return MASK
            return _BEARER.sub(rf"\g<1>{MASK}", _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", value))
        case Mapping():
            return mask_secrets({str(key): item for key, item in cast("Mapping[object, object]", value).items()})
        case Sequence():
            return [_masked(name, item) for item in cast("Sequence[object]", value)]
        case None | bool():
            return value
        case _:
            return MASK if _SECRET_NAME.search(name) else value
