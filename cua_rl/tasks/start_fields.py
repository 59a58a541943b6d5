"""Reading how a simulated phone begins: a dictionary with fields of `Start`, such as {"off": ["wifi"]}."""

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
    """The start that a dictionary with some of `Start`'s fields asks for; raises `ConfigError` for what cannot be."""
    given = read_mapping(value, what, _EXAMPLE)
    start = Start(**_parse_record(Start, given))
    _require_possible(start, what)
    return start


def _parse_record(kind: type, given: Fields) -> dict[str, Any]:
    kinds: dict[str, Any] = get_type_hints(kind)
    given.require_keys(kinds)
    return {key: _parse(kinds[key], given, key) for key in given.raw}


def _parse(kind: Any, given: Fields, key: str) -> object:
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    value = given.raw[key]
    if value is None and NoneType in members:
        return None
    member = next(member for member in members if member is not NoneType)
    if get_origin(member) is tuple:
        part = get_args(member)[0]
        return tuple(_parse_item(part, item, given, key) for item in given.items(key))
    return _parse_item(member, value, given, key)


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


def _require_possible(start: Start, what: str) -> None:
    apps = [*start.first_page, *start.second_page, *start.recent_apps, *([start.app] if start.app else [])]
    for app in apps:
        require_known(f"app in {what}", app, APPS)
    on_pages = [*start.first_page, *start.second_page]
    if len(set(on_pages)) < len(on_pages) or max(len(start.first_page), len(start.second_page)) > NUM_ICONS_PER_PAGE:
        raise ConfigError(
            f"expected each app once and at most {NUM_ICONS_PER_PAGE} apps on a home page in {what}, got first_page "
            f"{list(start.first_page)!r} and second_page {list(start.second_page)!r}; change them"
        )
    both = sorted(set(start.on) & set(start.off))
    if both:
        raise ConfigError(f"expected each toggle either on or off in {what}, got {both!r} in both; drop one")
