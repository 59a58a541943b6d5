"""Pagination cursors: opaque text that encodes where the next page starts."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime

from cua_rl.types.errors import CuaError
from cua_rl.types.json_values import is_array


class CursorError(CuaError, ValueError):
    """The text is not one of our cursors."""


def encode_cursor(*keys: object) -> str:
    """The sort keys of the last item shown."""
    plain = [key.isoformat() if isinstance(key, datetime) else key for key in keys]
    return urlsafe_b64encode(json.dumps(plain).encode()).decode().rstrip("=")


def decode_places(cursor: str, num_lists: int) -> list[tuple[float, int] | None]:
    """The sort key and number of the last item of each merged list; raises `CursorError`, as below."""
    return [None if place is None else _place(place) for place in _decode(cursor, num_lists)]


def _place(place: object) -> tuple[float, int]:
    if not is_array(place) or len(place) != 2:
        raise _error()
    key, number = place
    return (key if isinstance(key, float) else _number(key)), _number(number)


def decode_run_place(cursor: str) -> tuple[bool, datetime, int]:
    """The keys of a list sorted by a mark, time and number; raises `CursorError` if it is not one of our cursors."""
    is_first, time, number = _decode(cursor, 3)
    try:
        parsed = datetime.fromisoformat(str(time))
    except ValueError:
        raise _error() from None
    if parsed.tzinfo is None or not 1900 < parsed.year < 3000:
        raise _error()
    return is_first is True, parsed, _number(number)


def _decode(cursor: str, num_keys: int) -> list[object]:
    try:
        keys = json.loads(urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError):
        raise _error() from None
    if not isinstance(keys, list) or len(keys) != num_keys:  # pyright: ignore[reportUnknownArgumentType]
        raise _error()
    return keys  # pyright: ignore[reportUnknownVariableType]


def _number(key: object) -> int:
    if not isinstance(key, int) or isinstance(key, bool) or not -(2**63) <= key < 2**63:
        raise _error()
    return key


def _error() -> CursorError:
    return CursorError("expected the next_cursor of an earlier page, got something else; leave it out for the start")
