"""All environments and task sources, by name: those of this package and those that others bring."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from typing import cast

from cua_rl.environments.adb.environment import ADB
from cua_rl.environments.browser.environment import DJANGO_ADMIN, MINIWOB, PAGE, WEB
from cua_rl.environments.contract import Environment, Source
from cua_rl.environments.desktop.environment import DESKTOP
from cua_rl.environments.gbox.environment import GBOX
from cua_rl.environments.gym.environment import GYM
from cua_rl.environments.harness.environment import HARNESS
from cua_rl.environments.phone.environment import SIMULATOR
from cua_rl.tasks.fields import join_names, read_mapping
from cua_rl.types.errors import ConfigError, boundary

TaskSources = str | Mapping[str, object] | Sequence[Mapping[str, object]] | Sequence[Source]
"""One source or several, as dicts, as their JSON text, or parsed."""

ENTRY_POINTS = "cua_rl.environments"
"""The group of entry points with which other packages name their `Environment`s."""


_OWN = (SIMULATOR, ADB, GBOX, GYM, MINIWOB, DJANGO_ADMIN, PAGE, WEB, DESKTOP, HARNESS)


def _load_others() -> Iterator[Environment]:
    taken = {name for environment in _OWN for name in _names(environment)}
    for point in entry_points(group=ENTRY_POINTS):
        where = f"{point.value!r}, an entry point {ENTRY_POINTS!r} (correct it, or uninstall its package)"
        with boundary(ConfigError, f"load the environment {where}"):
            environment: object = point.load()
        if not isinstance(environment, Environment):
            raise ConfigError(f"expected an Environment at {where}, got {environment!r}")
        if twice := taken & _names(environment):
            raise ConfigError(f"expected names that no other environment has, got {sorted(twice)} at {where}")
        taken |= _names(environment)
        yield environment


def _names(environment: Environment) -> set[str]:
    return {environment.name, *(name for source in environment.sources for name in source.source_types)}


ENVIRONMENTS: Mapping[str, Environment] = {environment.name: environment for environment in (*_OWN, *_load_others())}
SOURCES: Mapping[str, tuple[Environment, type[Source]]] = {
    source_type: (environment, source)
    for environment in ENVIRONMENTS.values()
    for source in environment.sources
    for source_type in source.source_types
}
"""The environment that each type of source belongs to, and its class."""


def environment_of(source: Source) -> Environment | None:
    """The environment that this source's tasks bring; None if they run on the configured device."""
    environment, _ = SOURCES[source.source_type]
    return None if environment.is_configured else environment


DEFAULT_DEVICE = SIMULATOR.name


def find_environment(sources: TaskSources, device: str = DEFAULT_DEVICE) -> Environment:
    """What these tasks run on; raises `ConfigError` for a mixture."""
    used = list({environment_of(source): None for source in parse_sources(sources)})
    if len(used) > 1:
        names = ", ".join("the configured device" if one is None else one.name for one in used)
        raise ConfigError(f"expected tasks that run on one kind of device, got {names}; train on one of them at a time")
    return used[0] or ENVIRONMENTS[device]


def parse_sources(sources: TaskSources) -> list[Source]:
    """Parse and check task sources: keys, types, names."""
    raw: object = sources
    if isinstance(sources, str):
        try:
            raw = cast("object", json.loads(sources))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(
                f"expected task sources as JSON, got {sources!r} ({error}); write "
                'tasks=\'{"source_type": "demo_training"}\''
            ) from error
        if not isinstance(raw, dict | list):
            raise ConfigError(f"expected a JSON object or a list of them as task sources, got {sources!r}")
    items: list[object] = [raw] if isinstance(raw, Mapping) else list(cast("Sequence[object]", raw))
    if not items:
        raise ConfigError('expected at least one task source, got none; try {"source_type": "demo_training"}')
    return [item if isinstance(item, Source) else _parse_source(item) for item in items]


def _parse_source(item: object) -> Source:
    given = read_mapping(item, "a task source", '{"source_type": "demo_training"}')
    owners: dict[str, list[str]] = {}
    for source_type, (_, source) in SOURCES.items():
        for field in fields(source):
            if field.metadata or field.name == "source_type":
                owners.setdefault(field.name, []).append(source_type)
    # of a long list, a message shows the first names: those of this type of source, its own ones first
    chosen_type = given.raw.get("source_type")
    given.require_keys(sorted(owners, key=lambda key: (chosen_type not in owners[key], len(owners[key]))))
    chosen = given.choice("source_type", list(SOURCES))
    if chosen is None:
        raise ConfigError(
            f"expected source_type in a task source, got {dict(given.raw)!r}; add one of {join_names(SOURCES)}"
        )
    _, source = SOURCES[chosen]
    if source.required is not None and not given.raw.get(source.required):
        raise ConfigError(f"expected {source.required} beside source_type {chosen!r}, got none; add {source.required}")
    for key, value in given.raw.items():
        if value is not None and chosen not in owners[key]:
            raise ConfigError(
                f"expected {key} only with source_type {' or '.join(map(repr, owners[key]))}, got it with {chosen!r}; "
                f"set source_type to {owners[key][0]!r} or leave {key} out"
            )
    read = {field.name: field.metadata["read"] for field in fields(source) if field.metadata}
    return source(source_type=chosen, **{key: reader(given, key) for key, reader in read.items()})
