"""Configurations that may be stored and shown: secrets are masked."""

import os
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
_SHORTEST_SECRET = 8  # shorter values of secret variables ("1", "none") would mask innocent text


def mask_secrets(config: Mapping[str, object], secrets: Sequence[str] = ()) -> dict[str, object]:
    """The configuration with stars for values of settings named like `api_key`, passwords in URLs, and `secrets`."""
    return {name: _masked(name, value, secrets) for name, value in config.items()}


def environment_secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The values of environment variables with names such as OPENAI_API_KEY, wherever they may turn up."""
    return [value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET]


def secret_names(value: object) -> list[str]:
    """Names in nested JSON data that look like names of secrets."""
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


def _masked(name: str, value: object, secrets: Sequence[str]) -> object:
    match value:
        case str():
            if value and _SECRET_NAME.search(name):
                return MASK
            for secret in secrets:
                value = value.replace(secret, MASK)
            return _BEARER.sub(rf"\g<1>{MASK}", _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", value))
        case Mapping():
            nested = {str(key): item for key, item in cast("Mapping[object, object]", value).items()}
            return mask_secrets(nested, secrets)
        case Sequence():
            return [_masked(name, item, secrets) for item in cast("Sequence[object]", value)]
        case None | bool():
            return value
        case _:
            return MASK if _SECRET_NAME.search(name) else value
