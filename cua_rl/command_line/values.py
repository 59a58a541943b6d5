"""Converts text to values of the annotated type, and back, without importing or evaluating anything."""

import json
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from cua_rl.types.json_values import is_array, is_object

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NONE_WORDS = ("none", "null")


class UnfitValueError(ValueError):
    """The text is not a value of the type; the message says what was expected."""


def holds(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself: `int | None` holds (int, NoneType)."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_mapping(kind: Any) -> bool:
    """True for dict and Mapping annotations, with or without parameters."""
    return kind in (dict, Mapping) or get_origin(kind) in (dict, Mapping)


def is_sequence(kind: Any) -> bool:
    """True for list, tuple and Sequence annotations, with or without parameters."""
    return kind in (list, tuple, Sequence) or get_origin(kind) in (list, tuple, Sequence)


def parse_value(text: str, kind: Any) -> object:
    """Parse `text` as the first member of `kind` that it fits; raises `UnfitValueError` if it fits none."""
    members = holds(kind)
    if type(None) in members and text.strip().lower() in NONE_WORDS:
        return None
    members = tuple(member for member in members if member is not type(None))
    for member in members:
        try:
            return _parse_member(text, member)
        except UnfitValueError as error:
            if len(members) == 1:
                raise UnfitValueError(f"{error}{' or none' if type(None) in holds(kind) else ''}") from None
    raise UnfitValueError(type_name(kind) + _json_complaint(text, members))


def as_argument(value: object) -> str:
    """A value as it would stand after `name=` on a command line."""
    match value:
        case None | bool():
            return str(value).lower()
        case Mapping() | list() | tuple():
            return json.dumps(value, default=str)
        case date():
            return value.isoformat()
        case _:
            return str(value)


def type_name(kind: Any) -> str:
    """The type in words for a person: `int | None` is "a whole number or none"."""
    return " or ".join(dict.fromkeys(_member_name(member) for member in holds(kind)))


def _parse_member(text: str, kind: Any) -> object:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        for choice in choices:
            if str(choice).lower() == text.strip().lower():
                return choice
        raise UnfitValueError("one of " + ", ".join(str(choice) for choice in choices))
    if is_mapping(kind) or is_sequence(kind):
        return _parse_json(text, kind)
    parser = _PARSERS.get(kind)
    if parser is None:
        raise UnfitValueError(f"its parts, one by one, as in {'NAME.part=value'!r}")
    try:
        return parser(text)
    except ValueError:
        raise UnfitValueError(type_name(kind)) from None


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(word)
    return word in TRUE_WORDS


def _parse_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


_PARSERS: Mapping[object, Callable[[str], object]] = {
    str: str,
    int: int,
    float: _parse_float,
    bool: _parse_bool,
    Path: lambda text: Path(text).expanduser(),
    Any: str,
    object: str,
}


def _parse_json(text: str, kind: Any) -> object:
    part_kind = next(iter(get_args(kind)), str)
    is_simple = not (is_mapping(part_kind) or is_sequence(part_kind))
    if is_sequence(kind) and not text.lstrip().startswith("["):
        # lists of simple things may be `a,b`; lists of lists or dictionaries may not
        if not is_simple or text.lstrip().startswith("{"):
            raise UnfitValueError(type_name(kind) + _json_complaint(text, (kind,)))
        parts = [parse_value(part.strip(), part_kind) for part in text.split(",") if part.strip()]
        return tuple(parts) if tuple in (kind, get_origin(kind)) else parts
    try:
        value: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise UnfitValueError(type_name(kind) + _json_complaint(text, (kind,))) from None
    if is_mapping(kind) and is_object(value):
        return value
    if is_mapping(kind) or not is_array(value):
        raise UnfitValueError(type_name(kind))
    items = list(value)
    if is_mapping(part_kind) and not all(map(is_object, items)):
        raise UnfitValueError(type_name(kind))
    if is_simple:
        items = [parse_value(as_argument(item), part_kind) for item in items]
    return tuple(items) if tuple in (kind, get_origin(kind)) else items


def _json_complaint(text: str, members: tuple[Any, ...]) -> str:
    """Where JSON breaks off, if JSON was meant."""
    if not any(is_mapping(member) or is_sequence(member) for member in members) or text.lstrip()[:1] not in ("{", "["):
        return ""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f" (the JSON breaks at character {error.pos + 1}: {error.msg})"
    except RecursionError:
        return " (the JSON is nested too deeply)"
    return ""


def _member_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if is_mapping(kind):
        return "a JSON dictionary"
    if is_sequence(kind):
        part_kind = next(iter(get_args(kind)), str)
        simple = not (is_mapping(part_kind) or is_sequence(part_kind))
        return "a list a,b,c" if simple else f"a JSON list, each item {type_name(part_kind)}"
    return _NAMES.get(kind, str(kind))


_NAMES: Mapping[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    type(None): "none",
    Any: "anything",
    object: "anything",
}
