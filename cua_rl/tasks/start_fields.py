"""Parses the initial state of a simulated phone: a dictionary with fields of `Start`, such as {"off": ["wifi"]}."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from cua_rl.devices.simulator.catalog import APPS, NUM_ICONS_PER_PAGE
from cua_rl.devices.simulator.start import Start
from cua_rl.errors import ConfigError
from cua_rl.tasks.fields import Fields, read_mapping, require_known

_EXAMPLE = '{"off": ["wifi"]}'


def parse_start(value: object, what: str) -> Start:
    """The `Start` with the fields in a dictionary; raises `ConfigError` for impossible values."""
    start = Start(**_parse_record(Start, read_mapping(value, what, _EXAMPLE)))
    on_pages = [*start.first_page, *start.second_page]
    for app in (*on_pages, *start.recent_apps, *([start.app] if start.app else [])):
        require_known(f"app in {what}", app, APPS)
    if len(set(on_pages)) < len(on_pages) or max(len(start.first_page), len(start.second_page)) > NUM_ICONS_PER_PAGE:
        raise ConfigError(
            f"expected each app once and at most {NUM_ICONS_PER_PAGE} apps on a home page in {what}, got first_page "
            f"{list(start.first_page)!r} and second_page {list(start.second_page)!r}; change them"
        )
    both = sorted(set(start.on) & set(start.off))
    if both:
        raise ConfigError(f"expected each toggle either on or off in {what}, got {both!r} in both; drop one")
    return start


def _parse_record(kind: type, given: Fields) -> dict[str, Any]:
    kinds: dict[str, Any] = get_type_hints(kind)
    given.require_keys(kinds)
    record: dict[str, Any] = {}
    for key, value in given.raw.items():
        members = get_args(kinds[key]) if get_origin(kinds[key]) in (Union, UnionType) else (kinds[key],)
        member = next(member for member in members if member is not NoneType)
        if value is None and NoneType in members:
            record[key] = None
        elif get_origin(member) is tuple:
            part = get_args(member)[0]
            record[key] = tuple(_parse_item(part, item, given, key) for item in given.items(key))
        else:
            record[key] = _parse_item(member, value, given, key)
    return record


def _parse_item(kind: Any, value: object, given: Fields, key: str) -> object:
    if is_dataclass(cast(object, kind)):
        return kind(**_parse_record(kind, read_mapping(value, f"{key} in {given.what}", "{...}")))
    if issubclass(kind, StrEnum):
        require_known(f"{key} in {given.what}", str(value), [str(member) for member in kind])
        return kind(str(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise given.error(key, _NAMES.get(kind, kind.__name__))
    return value


_NAMES: Mapping[type, str] = {str: "text", int: "a whole number", bool: "true or false"}
