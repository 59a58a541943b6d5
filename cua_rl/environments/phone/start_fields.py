"""Parses the initial state of a simulated phone: a dictionary with fields of `Start`, such as {"off": ["wifi"]}."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from cua_rl.environments.phone.simulator import catalog
from cua_rl.environments.phone.simulator.start import Start, SystemStart
from cua_rl.environments.query_values import TIME
from cua_rl.tasks.fields import Fields, read_mapping, require_known
from cua_rl.types.errors import ConfigError

_EXAMPLE = '{"off": ["wifi"]}'


def parse_start(value: object, what: str) -> Start:
    """The `Start` with the fields in a dictionary; raises `ConfigError` for impossible values."""
    start = Start(**_parse_record(Start, read_mapping(value, what, _EXAMPLE)))
    on_pages = [*start.first_page, *start.second_page]
    for kind, known, names in _names(start):
        for name in names:
            require_known(f"{kind} in {what}", name, known)
    for key, level, allowed in _levels(start):
        if level is not None and level not in allowed:
            raise ConfigError(f"expected {key} from {min(allowed)} to {max(allowed)} in {what}, got {level}; change it")
    if start.apps.alarm is not None and not TIME.accepts(start.apps.alarm):
        raise ConfigError(f"expected alarm as a time such as 06:45 in {what}, got {start.apps.alarm!r}; change it")
    if {*start.first_rows} & {*start.hidden_rows} or len({*start.first_rows}) > catalog.NUM_ROWS_VISIBLE:
        raise ConfigError(
            f"expected at most {catalog.NUM_ROWS_VISIBLE} first_rows and others as hidden_rows in {what}, got "
            f"{list(start.first_rows)!r} and {list(start.hidden_rows)!r}; change them"
        )
    if (
        len(set(on_pages)) < len(on_pages)
        or max(len(start.first_page), len(start.second_page)) > catalog.NUM_ICONS_PER_PAGE
    ):
        raise ConfigError(
            f"expected each app once and at most {catalog.NUM_ICONS_PER_PAGE} apps on a home page in {what}, got "
            f"first_page {list(start.first_page)!r} and second_page {list(start.second_page)!r}; change them"
        )
    system = start.system or SystemStart()
    both = sorted({*start.on} & {*start.off} | {*system.on} & {*system.off})
    if both:
        raise ConfigError(f"expected each toggle either on or off in {what}, got {both!r} in both; drop one")
    return start


def _names(start: Start) -> Iterator[tuple[str, Collection[str], tuple[str, ...]]]:
    """What names are of, which are known, and those given."""
    system, apps = start.system or SystemStart(), start.apps
    on_pages = (*start.first_page, *start.second_page)
    yield "app", catalog.APPS, (*on_pages, *start.recent_apps, *([start.app] if start.app else []), *apps.off_home)
    changed = (system.running_app, system.notifying_app, system.silent_app)
    yield (
        "app",
        {**catalog.APPS, **catalog.STORE_APPS},
        (*filter(None, changed), *apps.on_home, *(apps.home_folder or ())[1:]),
    )
    yield "app of the store", catalog.STORE_APPS, (system.store_app,) if system.store_app else ()
    yield "row of Settings", catalog.SETTINGS, (*start.first_rows, *start.hidden_rows)
    yield "page of Settings", catalog.EXTRA_ROWS, system.extra_rows
    yield "switch", catalog.SWITCHES, (*system.on, *system.off)


def _levels(start: Start) -> Iterator[tuple[str, int | None, Collection[int]]]:
    yield "brightness_level", start.brightness_level, range(catalog.MIN_BRIGHTNESS, catalog.MAX_BRIGHTNESS + 1)
    yield "media_volume", start.media_volume, range(catalog.MAX_VOLUME + 1)
    yield "home_page", start.home_page, range(2)
    yield "num_photos", start.apps.num_photos, range(1000)
    yield "not_screen_timeout_ms", start.not_screen_timeout_ms, catalog.SCREEN_TIMEOUTS_MS
    yield "not_wallpaper", (start.system or SystemStart()).not_wallpaper, range(len(catalog.WALLPAPERS))


def _parse_record(kind: type, given: Fields) -> dict[str, Any]:
    kinds: dict[str, Any] = get_type_hints(kind)
    given.require_keys(kinds)
    for field in fields(kind):
        if field.name not in given.raw and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"expected {field.name} in {given.what}, got {dict(given.raw)!r}; add it")
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
