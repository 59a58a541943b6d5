"""Images in received items: stored as rows by the hash of their bytes, and replaced by `sha256:<hex>`."""

from collections.abc import Mapping
from typing import Any

from pybase64 import b64decode

from cua_rl.renderers.images import image_size
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.conversation import EncodedImage, ImageFormat
from cua_rl.types.json_values import is_array, is_object

PREFIX = "sha256:"
_MAX_PIXELS = 64_000_000
_FORMATS: dict[bytes, ImageFormat] = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def take_images(payload: Mapping[str, Any]) -> tuple[dict[str, Any], list[EncodedImage]]:
    """The payload with every data URI of a PNG or JPEG replaced, and those images; other text stays."""
    images: list[EncodedImage] = []

    def replaced(value: object) -> object:
        if isinstance(value, str) and value.startswith("data:image/"):
            image = _decode(value)
            if image is None:
                return value
            images.append(image)
            return PREFIX + image.sha256
        if is_object(value):
            return {name: replaced(item) for name, item in value.items()}
        return [replaced(item) for item in value] if is_array(value) else value

    return {name: replaced(value) for name, value in payload.items()}, images


def _decode(uri: str) -> EncodedImage | None:
    """The image of a data URI; None if it is neither PNG nor JPEG, broken or absurdly large."""
    _, comma, encoded = uri.partition(";base64,")
    try:
        data = b64decode(encoded, validate=True) if comma else b""
        image_format: ImageFormat | None = next(
            (name for start, name in _FORMATS.items() if data.startswith(start)), None
        )
        width_px, height_px = (0, 0) if image_format is None else image_size(data)
    except (ValueError, RequestError):
        return None
    if image_format is None or not 0 < width_px * height_px <= _MAX_PIXELS:
        return None
    return EncodedImage(data=data, format=image_format, width_px=width_px, height_px=height_px)
