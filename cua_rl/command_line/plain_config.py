"""Configuration as JSON that may be stored and shown: secrets are masked."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import chz

MASK = "***"
_SECRET_NAME = re.compile(r"(^|_)(api_?key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(@)")
_SHORTEST_SECRET = 8  # shorter values of secret variables ("1", "none") would mask innocent text


def plain_config(config: object) -> dict[str, object]:
    """A chz configuration as JSON data without secrets.

    Masked are values of settings named like `gbox_api_key`, passwords in URLs, and every value that an environment
    variable with such a name holds.
    """
    secrets = [
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    ]
    plain = _plain("", config, secrets)
    if not isinstance(plain, dict):
        raise TypeError(f"expected a chz configuration or a mapping, got {config!r}")
    return cast("dict[str, object]", plain)


def secret_names(value: object) -> list[str]:
    """Names inside nested JSON data that sound as if they held secrets."""
    match value:
        case Mapping():
            entries = cast("Mapping[str, object]", value).items()
            return [
                found
                for name, entry in entries
                for found in ([name] if _SECRET_NAME.search(name) else secret_names(entry))
            ]
        case list():
            return [name for entry in cast("list[object]", value) for name in secret_names(entry)]
        case _:
            return []


def _plain(name: str, value: object, secrets: Sequence[str]) -> object:
    if chz.is_chz(value):
        value = chz.asdict(value, shallow=True)
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            entries = cast("Mapping[Any, object]", value)
            return {str(key): _plain(str(key), entry, secrets) for key, entry in entries.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(name, entry, secrets) for entry in cast("Sequence[object]", value)]
        case _:
            return _masked(name, str(value), secrets)


def _masked(name: str, text: str, secrets: Sequence[str]) -> str:
    if text and _SECRET_NAME.search(name):
        return MASK
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", text)
