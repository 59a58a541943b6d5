"""Column types that can hold every string and float: Postgres takes no NUL, no lone surrogate, no NaN in JSON.

A model can sample any of them (`json.loads` of its answer, a byte-level token), so they are escaped on the way in and
restored on the way out. Ordinary text is stored as it is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, cast

from sqlalchemy import Dialect, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import TypeDecorator

_ESCAPE = "\x1a"
_UNSTORABLE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile(_ESCAPE + "([0-9a-f]+);")
_NON_FINITE_KEY = _ESCAPE + "float"


def escape_text(text: str) -> str:
    """Replace what Postgres cannot store by an escape; the inverse is `unescape_text`."""
    return _UNSTORABLE.sub(lambda match: f"{_ESCAPE}{ord(match.group()):x};", text)


def unescape_text(text: str) -> str:
    """Restore what `escape_text` replaced."""
    if _ESCAPE not in text:
        return text
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), text)


def escape_json(value: object) -> object:
    """Make a JSON value storable: strings escaped, non-finite floats as objects, tuples as lists."""
    match value:
        case str():
            return escape_text(value)
        case float() if not isfinite(value):
            return {_NON_FINITE_KEY: repr(value)}
        case Mapping():
            items = cast("Mapping[str, object]", value).items()
            return {escape_text(key): escape_json(item) for key, item in items}
        case Sequence():
            return [escape_json(item) for item in cast("Sequence[object]", value)]
        case _:
            return value


def unescape_json(value: object) -> object:
    """Restore what `escape_json` replaced."""
    match value:
        case str():
            return unescape_text(value)
        case dict():
            items = cast("dict[str, object]", value)
            if _NON_FINITE_KEY in items:
                return float(str(items[_NON_FINITE_KEY]))
            return {unescape_text(key): unescape_json(item) for key, item in items.items()}
        case list():
            return [unescape_json(item) for item in cast("list[object]", value)]
        case _:
            return value


class AnyText(TypeDecorator[str]):
    """TEXT for any Python string."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else unescape_text(value)


class AnyJson(TypeDecorator[object]):
    """JSONB for any JSON value, with any string and any float in it; None is SQL NULL."""

    impl = JSONB(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: object, dialect: Dialect) -> object:
        return escape_json(value)

    def process_result_value(self, value: object, dialect: Dialect) -> object:
        return unescape_json(value)


class NumberArray(ARRAY[Any]):
    """An array of integers or floats, sent as one text: the driver's own way is slow for long prompts."""

    cache_ok = True

    def bind_processor(  # pyright: ignore[reportIncompatibleMethodOverride] - SQLAlchemy's type for it is private
        self, dialect: Dialect
    ) -> Callable[[Any], Any]:
        """`repr` of a float is exact, and Postgres reads it so."""

        def process(value: Sequence[float] | None) -> str | None:
            return None if value is None else "{" + ",".join(map(repr, value)) + "}"

        return process
