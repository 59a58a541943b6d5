"""Reads untrusted JSON field by field, with errors that name the path of the field."""

from collections.abc import Sequence

from cua_rl.renderers.request_error import RequestError
from cua_rl.types.json_values import Json, is_array, is_object


class FieldPath(str):
    """The path of a field in a request, such as `input[3].content[0].image_url`."""

    __slots__ = ()

    def __truediv__(self, field: str) -> "FieldPath":
        return FieldPath(f"{self}.{field}")

    def error(self, expected: str, got: object, do: str) -> RequestError:
        """The error for a value at this path; long values are cut."""
        shown = repr(got)
        shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
        return RequestError(expected=f"{expected} at {self}", got=shown, do=do)


def mapping_at(value: object, at: FieldPath) -> Json:
    if not is_object(value):
        raise at.error("an object", value, "correct the request")
    return value


def list_at(value: object, at: FieldPath) -> Sequence[object]:
    if not is_array(value):
        raise at.error("a list", value, "correct the request")
    return value


def optional_list_at(value: object, at: FieldPath) -> Sequence[object]:
    """A JSON array, empty if it is missing or null."""
    return () if value is None else list_at(value, at)


def text_at(fields: Json, name: str, at: FieldPath) -> str:
    """A string that can be encoded (JSON can hold lone surrogates, which no text can)."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise (at / name).error("a string", value, "correct the request")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise (at / name).error("valid Unicode", str(error), "remove the lone surrogates") from error
    return value


def optional_text_at(fields: Json, name: str, at: FieldPath) -> str | None:
    """A string, or None if it is missing or null."""
    return None if fields.get(name) is None else text_at(fields, name, at)
