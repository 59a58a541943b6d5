"""An agent's request as it is kept: plain JSON, every image replaced by the hash of its bytes."""

from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from typing import cast

_IMAGE_PREFIX = "data:image/"


def without_images(request: Mapping[str, object]) -> dict[str, object]:
    """A copy of the request in which `data:` image URLs read `sha256:<hex>`."""
    return {key: _replaced(value) for key, value in request.items()}


def _replaced(value: object) -> object:
    if isinstance(value, str):
        return _hashed(value) if value.startswith(_IMAGE_PREFIX) else value
    if isinstance(value, Mapping):
        return {key: _replaced(inner) for key, inner in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list):
        return [_replaced(inner) for inner in cast("list[object]", value)]
    return value


def _hashed(url: str) -> str:
    encoded = url.partition(",")[2]
    return f"sha256:{sha256(b64decode(encoded)).hexdigest()}"
