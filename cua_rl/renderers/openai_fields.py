"""Reading untrusted JSON field by field, with errors that name the place; images come from `data:` URLs only."""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import cast

from cua_rl.conversation import ImageFormat, ImagePart
from cua_rl.renderers.request_error import RequestError

Json = Mapping[str, object]

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg);base64,")
_MAGIC: Mapping[ImageFormat, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}


class Place(str):
    """Where in a request something is, such as `input[3].content[0].image_url`."""

    __slots__ = ()

    def __truediv__(self, field: str) -> "Place":
        return Place(f"{self}.{field}")

    def error(self, expected: str, got: object, do: str) -> RequestError:
        """The error for a value at this place; long values are cut."""
        shown = repr(got)
        shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
        return RequestError(expected=f"{expected} at {self}", got=shown, do=do)


def mapping_at(value: object, at: Place) -> Json:
    """A JSON object."""
    if not isinstance(value, Mapping):
        raise at.error("an object", value, "correct the request")
    return cast("Json", value)


def list_at(value: object, at: Place) -> Sequence[object]:
    """A JSON array."""
    if not isinstance(value, list | tuple):
        raise at.error("a list", value, "correct the request")
    return cast("Sequence[object]", value)


def optional_list_at(value: object, at: Place) -> Sequence[object]:
    """A JSON array, empty if it is missing or null."""
    return () if value is None else list_at(value, at)


def text_at(fields: Json, name: str, at: Place) -> str:
    """A string that can be encoded (JSON can hold lone surrogates, which no text can)."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise (at / name).error("a string", value, "correct the request")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise (at / name).error("valid Unicode", str(error), "remove the lone surrogates") from error
    return value


def optional_text_at(fields: Json, name: str, at: Place) -> str | None:
    """A string, or None if it is missing or null."""
    return None if fields.get(name) is None else text_at(fields, name, at)


def image_part(url: object, at: Place) -> ImagePart:
    """The image inside a `data:` URL; its bytes, not the URL, say which format it has."""
    head = _DATA_URL.match(url) if isinstance(url, str) else None
    if head is None or not isinstance(url, str):
        raise at.error("a data: URL with a base64 PNG or JPEG image", url, "send the image itself, not a link to it")
    try:
        data = b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise at.error("base64 image data", str(error), "encode the image bytes with base64") from error
    for image_format, magic in _MAGIC.items():
        if data.startswith(magic):
            return ImagePart(data=data, format=image_format)
    raise at.error("PNG or JPEG bytes", data[:8], "encode the screenshot as PNG")
