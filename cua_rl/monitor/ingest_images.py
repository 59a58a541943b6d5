"""Images in what is sent: stored once by the hash of their bytes, and replaced by `sha256:<hex>`."""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any, cast

from PIL import Image
from sqlalchemy import Connection, select
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Screenshot

PREFIX = "sha256:"
_MAX_PIXELS = 64_000_000
_FORMATS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def store_images(connection: Connection, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload with every data URI of a PNG or JPEG stored and replaced; other texts stay."""
    return {name: _replaced(connection, value) for name, value in payload.items()}


def _replaced(connection: Connection, value: object) -> object:
    match value:
        case str():
            return _store(connection, value) if value.startswith("data:image/") else value
        case dict():
            return store_images(connection, cast("dict[str, Any]", value))
        case list():
            return [_replaced(connection, item) for item in cast("list[object]", value)]
        case _:
            return value


def _store(connection: Connection, uri: str) -> str:
    _, comma, encoded = uri.partition(";base64,")
    try:
        data = b64decode(encoded, validate=True) if comma else b""
    except (binascii.Error, ValueError):
        return uri
    image_format = next((name for start, name in _FORMATS.items() if data.startswith(start)), None)
    if image_format is None:
        return uri
    size = _size(data)
    if size is None:
        return uri
    digest = sha256(data).hexdigest()
    statement = insert(Screenshot).values(
        sha256=digest, data=data, format=image_format, width_px=size[0], height_px=size[1]
    )
    connection.execute(statement.on_conflict_do_nothing())
    return PREFIX + digest


def _size(data: bytes) -> tuple[int, int] | None:
    """Width and height from the image's head; None if it is broken or absurd."""
    try:
        with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            width, height = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (width, height) if 0 < width * height <= _MAX_PIXELS else None


def stored_hash(connection: Connection, reference: str | None) -> str | None:
    """The hash of `sha256:<hex>`, if there is such a screenshot."""
    if reference is None or not reference.startswith(PREFIX):
        return None
    digest = reference.removeprefix(PREFIX)
    return connection.scalar(select(Screenshot.sha256).where(Screenshot.sha256 == digest))
