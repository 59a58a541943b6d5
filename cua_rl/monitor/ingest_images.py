"""Images in what is sent: taken out as rows by the hash of their bytes, and replaced by `sha256:<hex>`."""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from io import BytesIO
from typing import Any, cast

from PIL import Image

from cua_rl.conversation import EncodedImage, ImageFormat

PREFIX = "sha256:"
_MAX_PIXELS = 64_000_000
_FORMATS: dict[bytes, ImageFormat] = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def take_images(payload: Mapping[str, Any]) -> tuple[dict[str, Any], list[EncodedImage]]:
    """The payload with every data URI of a PNG or JPEG replaced, and those images; other text stays."""
    images: list[EncodedImage] = []

    def replaced(value: object) -> object:
        match value:
            case str() if value.startswith("data:image/"):
                image = _decode(value)
                if image is None:
                    return value
                images.append(image)
                return PREFIX + image.sha256
            case dict():
                return {name: replaced(item) for name, item in cast("dict[str, object]", value).items()}
            case list():
                return [replaced(item) for item in cast("list[object]", value)]
            case _:
                return value

    return {name: replaced(value) for name, value in payload.items()}, images


def _decode(uri: str) -> EncodedImage | None:
    _, comma, encoded = uri.partition(";base64,")
    try:
        data = b64decode(encoded, validate=True) if comma else b""
    except (binascii.Error, ValueError):
        return None
    image_format: ImageFormat | None = next((name for start, name in _FORMATS.items() if data.startswith(start)), None)
    size = None if image_format is None else _size(data)
    if image_format is None or size is None:
        return None
    return EncodedImage(data=data, format=image_format, width_px=size[0], height_px=size[1])


def _size(data: bytes) -> tuple[int, int] | None:
    """Width and height from the image's header; None if it is broken or absurdly large."""
    try:
        with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            width, height = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (width, height) if 0 < width * height <= _MAX_PIXELS else None
