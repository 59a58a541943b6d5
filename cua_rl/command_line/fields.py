"""Metadata of configuration fields (limits, fields set by the run) and presets.

A configuration is a chz class; its fields that are chz classes themselves are groups (`loss.clip_low`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import chz
from chz.tiepin import is_subtype_instance, type_repr  # pyright: ignore[reportUnknownVariableType] - of what takes a type

Config = TypeVar("Config")
Metadata = dict[str, Any]

Given = Mapping[str, object]
"""Explicitly given settings, by path."""

AT_MOST_A_DAY = (0.0, 86400.0)
"""Limits of a time limit, seconds."""


def setting(
    default: object = None,
    doc: str = "",
    *,
    factory: Callable[[], object] | None = None,
    at_least: float | None = None,
    within: tuple[float, float] | None = None,
    for_group: bool = False,
    by_run: bool = False,
    per_attempt: bool = False,
    not_offered: tuple[str, ...] = (),
) -> Any:
    """A field of a configuration class, with its default (or the `factory` of one) and its meaning.

    Numbers must be `at_least` this, or above the first and at most the second number of `within`; None is always valid.
    `for_group`: the setting that is meant when its group is given a plain value: `loss=ppo` is `loss.name=ppo`.
    `by_run`: filled in by the run, no setting for people, and never stored. `per_attempt`: about one start of a run, so
    that a resumed run does not take it from the earlier attempt. `not_offered`: values of the type that code may give,
    and people may not.
    """
    metadata: Metadata = {
        **{"at_least": at_least, "within": within, "for_group": for_group, "by_run": by_run},
        **{"per_attempt": per_attempt, "not_offered": not_offered},
    }
    if factory is not None:
        return chz.field(default_factory=factory, doc=doc, metadata=metadata)
    return chz.field(default=default, doc=doc, metadata=metadata)


@cache
def setting_fields(config_class: type[Any]) -> Mapping[str, Any]:
    """The chz fields that people set, in the order of declaration."""
    fields: Mapping[str, Any] = chz.chz_fields(config_class)
    return {name: field for name, field in fields.items() if not metadata_of(field).get("by_run")}


def metadata_of(field: Any) -> Metadata:
    """What the field of a configuration class says beside type, default and meaning."""
    return cast("Metadata | None", field.metadata) or {}


def with_values(config: Config, **changes: object) -> Config:
    """The configuration or group with other values, which count as given."""
    changed = chz.replace(config, **changes)  # pyright: ignore[reportUnknownMemberType] # chz leaves them untyped
    object.__setattr__(changed, _GIVEN, _given_names(config) | changes.keys())
    return changed


def given_settings(config: object) -> dict[str, object]:
    """The settings that a configuration with presets was constructed with, by path; of groups, what they were given.

    All of them if `chz.replace` made it, which constructs it again with every value; `with_values` does not.
    """
    given: dict[str, object] = {}
    for name in _given_names(config):
        value: object = getattr(config, name)
        inner = {f"{name}.{leaf}": each for leaf, each in given_settings(value).items()} if chz.is_chz(value) else {}
        given |= inner if chz.is_chz(value) else {name: value}
    return given


def walk_settings(config: object, prefix: str = "") -> Iterator[tuple[str, Any, object]]:
    """Path, chz field and value of every setting of a configuration, those of groups after the group itself."""
    for name, field in setting_fields(type(config)).items():
        value: object = getattr(config, name)
        yield prefix + name, field, value
        if chz.is_chz(value):
            yield from walk_settings(value, f"{prefix}{name}.")


_PLAIN = (bool, int, float, type(None))


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def check_numbers(config: object) -> None:
    """Raise `ValueError` for the first number outside the limits of its field; None is always valid where it may be.

    Configurations made in Python may also hold a value of another type: text for a number would fail far from here, and
    `trace="no"` would mean yes.
    """
    for path, field, value in walk_settings(config):
        kinds = _members(field.x_type)
        is_plain = all(kind in _PLAIN or get_origin(kind) is Literal or chz.is_chz(kind) for kind in kinds)
        is_nan = value != value
        if is_plain and (is_nan or not is_subtype_instance(value, field.x_type)):
            raise ValueError(f"{path}: expected {type_repr(field.x_type)}, got {value!r}; correct {path}")
        limits = metadata_of(field)
        if not isinstance(value, int | float):
            continue
        least, bounds = limits.get("at_least"), limits.get("within")
        if least is not None and value < least:
            raise ValueError(f"{path}: expected at least {least}, got {value!r}; set {path}={least} or more")
        if bounds is not None and not bounds[0] < value <= bounds[1]:
            raise ValueError(
                f"{path}: expected a number above {bounds[0]} and at most {bounds[1]}, got {value!r}; change {path}"
            )


def with_presets(
    find_presets: Callable[[Given], Given],
    explain: Callable[[type[Any], str], str],
    accept: Callable[[type[Any], str, object], object],
) -> Callable[[type[Config]], type[Config]]:
    """Decorate a configuration class: what is not given comes from `find_presets(given)` before the field's default.

    Command lines and callers in Python both construct the class, so one place decides. Its instances and their groups
    know what they were constructed with. `explain` says what is wrong with a name that is not a field; `accept` reads a
    value as a command line writes it: the JSON of a list, or the name of a loss for its group.
    """

    def decorate(config_class: type[Config]) -> type[Config]:
        construct: Callable[..., None] = config_class.__init__
        fields = cast("Mapping[str, Any]", chz.chz_fields(config_class))
        _remember_given(fields)

        @wraps(construct)
        def construct_with_presets(self: Config, **given: Any) -> None:
            unknown = next((name for name in given if name not in fields), None)
            if unknown is not None:
                raise TypeError(explain(config_class, unknown))
            given = {name: accept(config_class, name, value) for name, value in given.items()}
            values, paths = dict(given), dict(given)
            for name, value in given.items():
                if chz.is_chz(value):
                    paths |= {f"{name}.{leaf}": getattr(value, leaf) for leaf in _given_names(value)}
            for path, preset in find_presets(MappingProxyType(paths)).items():
                name, _, leaf = path.partition(".")
                if not leaf:
                    values.setdefault(name, preset)
                elif leaf not in _given_names(given.get(name)):
                    group = values[name] if name in values else fields[name]._default_factory()
                    if not chz.is_chz(group):
                        continue  # `check_numbers` says so
                    values[name] = with_values(group, **{leaf: preset})
                    object.__setattr__(values[name], _GIVEN, _given_names(group))  # a preset is not what was asked for
            object.__setattr__(self, _GIVEN, frozenset(given))
            construct(self, **values)

        config_class.__init__ = construct_with_presets  # pyrefly: ignore[method-assign]
        return config_class

    return decorate


_GIVEN = "_given_names"  # an attribute beside the fields: what equals a default may still have been asked for


def _remember_given(fields: Mapping[str, Any]) -> None:
    """From now on, instances of the groups among these fields know which fields they were constructed with."""
    for group_class in [kind for field in fields.values() for kind in _members(field.x_type) if chz.is_chz(kind)]:
        construct: Callable[..., None] = group_class.__init__
        if _GIVEN not in vars(construct):
            group_class.__init__ = _remembering(construct)


def _remembering(construct: Callable[..., None]) -> Callable[..., None]:
    @wraps(construct)
    def construct_and_remember(self: object, **given: Any) -> None:
        object.__setattr__(self, _GIVEN, frozenset(given))
        construct(self, **given)

    vars(construct_and_remember)[_GIVEN] = True
    return construct_and_remember


def _given_names(group: object) -> frozenset[str]:
    return cast("frozenset[str]", vars(group).get(_GIVEN, frozenset())) if chz.is_chz(group) else frozenset()
