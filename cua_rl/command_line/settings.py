"""The settings of a configuration class as people name them, and `--help`, which shows them."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args

import chz

from cua_rl.command_line.fields import metadata_of, setting_fields, walk_settings
from cua_rl.command_line.values import (
    UnfitValueError,
    as_argument,
    holds,
    is_mapping,
    is_sequence,
    parse_value,
    type_name,
)
from cua_rl.host.masking import is_secret_name
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_array, is_object

Sections = Mapping[str, Sequence[str]]
"""Headings of `--help`, and the settings or groups below each."""
ShownPresets = Mapping[str, Mapping[str, object]]
"""Under which condition (a line of text) which settings have other values than their defaults."""
NO_SECTIONS: Sections = MappingProxyType({})
NO_PRESETS: ShownPresets = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a configuration class; the name of one in a group has dots."""

    name: str
    kind: Any
    """The annotated type."""
    doc: str
    default: object
    """REQUIRED if it has no default."""
    group: type[Any] | None = None
    """The nested configuration class, if the setting is a group."""
    is_for_group: bool = False
    """Meant when the group is given a plain value."""
    is_per_attempt: bool = False
    """A resumed run does not take it from the earlier attempt."""


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@cache
def list_settings(config_class: type[Any], prefix: str = "") -> tuple[Setting, ...]:
    """All settings of a chz class in the order of declaration, those of a group after the group."""
    settings: list[Setting] = []
    for name, field in setting_fields(config_class).items():
        default: object = field._default  # chz has no public way to ask
        if callable(field._default_factory):
            default = field._default_factory()
        elif type(default).__name__ == "MISSING_TYPE":
            default = REQUIRED
        group = next((kind for kind in holds(field.x_type) if chz.is_chz(kind)), None)
        setting = Setting(
            name=prefix + name,
            kind=_offered(field),
            doc=field._doc or (group.__doc__ if group else ""),
            default=default,
            group=group,
            is_for_group=metadata_of(field).get("for_group", False),
            is_per_attempt=metadata_of(field).get("per_attempt", False),
        )
        settings.append(setting)
        if group is not None:
            settings.extend(list_settings(group, f"{setting.name}."))
    return tuple(settings)


def changed_settings(config: object) -> dict[str, object]:
    """The settings that differ from the defaults of their class, by path; presets and what a run has chosen count."""
    defaults = {setting.name: setting.default for setting in list_settings(type(config))}
    values = {path: value for path, _, value in walk_settings(config) if not chz.is_chz(value)}
    return {path: value for path, value in values.items() if value != defaults[path]}


def _offered(field: Any) -> Any:
    """The field's type, without the choices that it does not offer."""
    hidden = metadata_of(field).get("not_offered") or ()
    choices = tuple(choice for choice in get_args(field.x_type) if choice not in hidden)
    return Literal[choices] if hidden else field.x_type  # pyrefly: ignore[not-a-type]


class SettingNames:
    """Finds the setting that a name means: `loss.clip_low`, `loss_clip_low`, `clip_low`; `loss` for `loss.name`."""

    def __init__(self, config_class: type[Any]) -> None:
        self.all: Mapping[str, Setting] = {setting.name: setting for setting in list_settings(config_class)}

    def find(self, name: str) -> Setting:
        """The setting of this name; a group is one that is set as a whole.

        Raises:
            ConfigError: no setting has this name, or several groups have one.
        """
        if name in self.all:
            setting = self.all[name]
            inner = (each for path, each in self.all.items() if path.rpartition(".")[0] == name)
            return next((each for each in inner if each.is_for_group), setting)
        joined = [setting for path, setting in self.all.items() if path.replace(".", "_") == name]
        found = joined or [setting for path, setting in self.all.items() if path.rpartition(".")[2] == name]
        if len(found) > 1:
            choices = ", ".join(setting.name for setting in found)
            raise ConfigError(f"expected one setting, got {name!r}, which several groups have; choose among {choices}")
        if not found:
            names = {path.rpartition(".")[2]: path for path in self.all} | {path: path for path in self.all}
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            advice = f"did you mean {names[near[0]]!r}?" if near else "see --help"
            raise ConfigError(f"expected the name of a setting, got {name!r}; {advice} (--help all lists all of them)")
        return found[0]

    def find_file(self, name: str) -> Setting | None:
        """The secret that `gbox_api_key_file` names a file for; None for other names."""
        base = name.removesuffix("_file")
        if base == name or not is_secret_name(base) or name in self.all:
            return None
        try:
            return self.find(base)
        except ConfigError:
            return None

    def find_entry(self, name: str) -> tuple[Setting, str] | None:
        """The dictionary that `tasks.source_type` names an entry of, and the entry's key; None for other names."""
        parts = name.split(".")
        for number in range(len(parts) - 1, 0, -1):
            try:
                owner = self.find(".".join(parts[:number]))
            except ConfigError:
                continue
            if any(is_mapping(kind) for kind in holds(owner.kind)):
                return owner, ".".join(parts[number:])
        return None


def explain_field(config_class: type[Any], name: str) -> str:
    """What to write in Python instead of a name that is no field of the class."""
    names = SettingNames(config_class)
    try:
        setting = names.find(name)
    except ConfigError as error:
        return f"{config_class.__name__}: {error}"
    group, _, leaf = setting.name.rpartition(".")
    group_class = names.all[group].group
    assert group_class is not None, "a setting that is no field of the class itself lies in a group"
    return (
        f"{config_class.__name__}: expected {name} inside its group, got it outside; write "
        f"{config_class.__name__}({group}={group_class.__name__}({leaf}=...))"
    )


def accept_value(config_class: type[Any], name: str, value: object) -> object:
    """The value of a field given in Python, where it is written as on a command line: the JSON of a list or dictionary,
    a tuple for a list, or for a group its main setting (`loss="ppo"`) or a dictionary.

    Raises:
        ConfigError: it is none of these.
    """
    field = setting_fields(config_class).get(name)
    if field is None or value is None or chz.is_chz(value):
        return value
    kinds = holds(field.x_type)
    group: Any = next((kind for kind in kinds if chz.is_chz(kind)), None)
    if group is not None:
        leaf = next((key for key, one in setting_fields(group).items() if metadata_of(one).get("for_group")), None)
        given = value if is_object(value) else {str(leaf): value}
        for key in given:
            if key not in setting_fields(group):
                near = difflib.get_close_matches(str(key), setting_fields(group), n=1)
                do = f"did you mean {near[0]!r}?" if near else f"write {name}={group.__name__}(...)"
                raise ConfigError(f"{name}: expected settings of {group.__name__}, got {value!r}; {do}")
        return group(**given)
    if not any(is_mapping(kind) or is_sequence(kind) for kind in kinds) or str in kinds:
        return value
    try:
        parsed = parse_value(value if isinstance(value, str) else as_argument(value), field.x_type)
    except UnfitValueError as error:
        example = as_argument(field._default_factory()) if callable(field._default_factory) else "None"
        raise ConfigError(f"{name}: expected {error}, got {value!r}; for example {example}") from None
    is_parsed = is_object(value) or (is_array(value) and not isinstance(value, tuple))
    return value if is_parsed else parsed


def format_help(
    config_class: type[Any],
    sections: Sections = NO_SECTIONS,
    presets: ShownPresets = NO_PRESETS,
    topic: str | None = None,
) -> str:
    """What `--help` prints: the settings of `sections`; `topic` is a group of which all are shown, or "all".

    Without sections, all settings are shown. What has other defaults under which condition comes last.
    """
    names = SettingNames(config_class)
    secret = next((name for name in names.all if is_secret_name(name)), None)
    place = (
        "the environment or .env" if secret is None else f"the environment, .env, or a private file: {secret}_file=PATH"
    )
    lines = [
        "Settings, as key=value, --key value or --key=value; the last one wins.",
        "--config FILE.yaml reads settings from a file; the command line overrides it.",
        f"A secret is better in {place}.",
        "The last part of a name is enough if only one group has it: clip_low=0.3 is loss.clip_low=0.3.",
    ]
    settings = [setting for setting in names.all.values() if setting.group is None]
    if topic == "all" or (topic is None and not sections):
        lines += ["", *(line for setting in settings for line in _setting_lines(setting, setting.name))]
    elif topic is not None:
        if topic not in names.all or names.all[topic].group is None:
            groups = ", ".join(name for name, setting in names.all.items() if setting.group is not None)
            raise ConfigError(f"expected a group of settings after --help, got {topic!r}; choose among all, {groups}")
        chosen = [setting for setting in settings if setting.name.startswith(f"{topic}.")]
        lines += ["", *(line for setting in chosen for line in _setting_lines(setting, setting.name))]
    else:
        for heading, shown in sections.items():
            lines += ["", f"{heading}:"]
            lines += [line for name in shown for line in _setting_lines(names.find(name), name)]
        groups = [setting for setting in names.all.values() if setting.group is not None]
        lines += ["", "Groups of further settings; --help GROUP lists one, --help all lists everything:"]
        lines += [f"  {setting.name}: {setting.doc}" for setting in groups]
    for condition, values in presets.items():
        lines += ["", f"{condition}:"]
        lines += [f"  {name}={as_argument(value)}" for name, value in values.items()]
    return "\n".join(lines)


def _setting_lines(setting: Setting, name: str) -> list[str]:
    return [
        f"  {name}={as_argument(setting.default)}",
        f"      {setting.doc or 'no description'} [{type_name(setting.kind)}]",
    ]
