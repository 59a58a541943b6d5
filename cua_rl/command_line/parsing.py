"""From the command line to a chz configuration: `key=value`, `--key value`, `--key=value`, `--flag`, `--config FILE`
and `--help`.

Nested settings have dots (`lora.rank=16`). Lists and dictionaries are JSON (`tasks='{"source_type": "ids"}'`); a list
of words may be `a,b`; entries of a dictionary may be set one by one (`tasks.source_type=ids`). Later arguments win.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import chz
from chz.blueprint._entrypoint import EntrypointException  # exported nowhere else

from cua_rl.command_line.config_file import as_argument, read_config_file
from cua_rl.command_line.values import UnfitValueError, holds, is_mapping, parse_value, type_name
from cua_rl.errors import ConfigError

Config = TypeVar("Config")

CONFIG_FILE = "config"
"""The argument that names a file of settings; no recipe has a setting of this name."""

ShownPresets = Mapping[str, Mapping[str, object]]
"""Under which condition (a line of text) which settings have other values than their defaults."""
NO_PRESETS: ShownPresets = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a configuration class; the name of a nested one has dots."""

    name: str
    kind: Any
    """The annotated type."""
    doc: str
    default: object
    """REQUIRED if there is none."""

    @property
    def parts(self) -> type[Any] | None:
        """The nested configuration class, if the setting is one."""
        return next((kind for kind in holds(self.kind) if chz.is_chz(kind)), None)


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


def parse_command_line(
    config_class: type[Config], argv: Sequence[str], shown_presets: ShownPresets = NO_PRESETS
) -> Config:
    """Build the configuration.

    Prints the settings and exits with status 0 for `--help`, below them `shown_presets`: what the class itself may set.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type or is missing, or a rule between settings is broken.
    """
    settings = {setting.name: setting for setting in list_settings(config_class)}
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print(format_help(config_class, shown_presets))
        raise SystemExit(0)
    values: dict[str, object] = {}
    given: set[str] = set()
    arguments = list(_split_arguments(argv, settings))
    for path in [text for name, text in arguments if name == CONFIG_FILE]:
        apply_file(values, given, Path(path), settings)
    for name, text in arguments:
        if name != CONFIG_FILE:
            _set_value(values, given, name, text, settings)
    missing = [name for name, setting in settings.items() if setting.default is REQUIRED and "." not in name]
    missing = [name for name in missing if not any(key == name or key.startswith(f"{name}.") for key in values)]
    if missing:
        raise ConfigError(f"expected a value for {', '.join(missing)}, got none; add {missing[0]}=...")
    return _construct(config_class, values)


def load_config(config_class: type[Config], path: Path | str, **given: object) -> Config:
    """The configuration that a YAML file describes; what is `given` here wins over it.

    Raises:
        ConfigError: as for a command line.
    """
    settings = {setting.name: setting for setting in list_settings(config_class)}
    values: dict[str, object] = {}
    apply_file(values, set(), Path(path), settings)
    for name in given:
        _check_name(name, settings)
    return _construct(config_class, values | given)


def apply_file(values: dict[str, object], given: set[str], path: Path, settings: Mapping[str, Setting]) -> None:
    """Set the values of a file; their names go into `given`."""
    for name, text in read_config_file(path).items():
        is_nested = name in settings and settings[name].parts is not None and text.startswith("{")
        entries = cast("dict[str, object]", json.loads(text)) if is_nested else {}
        parts = {f"{name}.{key}": as_argument(value) for key, value in entries.items()} if is_nested else {name: text}
        for part, part_text in parts.items():
            try:
                _check_name(part, settings)
                _set_value(values, given, part, part_text, settings)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None


def list_settings(config_class: type[Any], prefix: str = "") -> list[Setting]:
    """All settings of a chz class in the order of declaration, each nested class's after its own."""
    settings: list[Setting] = []
    for name, field in chz.chz_fields(config_class).items():
        default: object = field._default  # pyright: ignore[reportPrivateUsage] # chz has no public way to ask
        factory: object = field._default_factory  # pyright: ignore[reportPrivateUsage]
        if callable(factory):
            default = factory()
        elif type(default).__name__ == "MISSING_TYPE":
            default = REQUIRED
        doc = field._doc  # pyright: ignore[reportPrivateUsage]
        setting = Setting(name=prefix + name, kind=field.x_type, doc=doc, default=default)
        settings.append(setting)
        if setting.parts is not None:
            settings.extend(list_settings(setting.parts, f"{setting.name}."))
    return settings


def format_help(config_class: type[Any], shown_presets: ShownPresets = NO_PRESETS) -> str:
    """The settings with meaning, type and default, then what presets them under which condition: as `--help` prints."""
    lines = [
        "Settings, as key=value, --key value or --key=value; later ones win.",
        "--config FILE.yaml reads settings from a file; the command line wins over it.",
        "",
    ]
    for setting in list_settings(config_class):
        if setting.parts is not None:
            continue
        lines.append(f"  {setting.name}={as_argument(setting.default)}")
        lines.append(f"      {setting.doc or 'no description'} [{type_name(setting.kind)}]")
    for condition, presets in shown_presets.items():
        lines += ["", f"{condition}:"]
        lines += [f"  {name}={as_argument(value)}" for name, value in presets.items()]
    return "\n".join(lines)


def _split_arguments(argv: Sequence[str], settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each argument, whichever way it is written."""
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name = _key(argument)
        if not argument.startswith("--") and "=" not in argument:
            raise ConfigError(f"expected key=value or --key value, got {argument!r}; --help lists the settings")
        _check_name(name, settings)
        if "=" in argument:
            yield name, argument.split("=", 1)[1]
        elif name in settings and bool in holds(settings[name].kind) and not (rest and _is_bool(rest[0])):
            yield name, "true"
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"expected a value after {argument!r}, got none; write {name}=...")
        else:
            yield name, rest.pop(0)


def _key(argument: str) -> str:
    return argument.removeprefix("--").split("=", 1)[0].replace("-", "_")


def _is_bool(text: str) -> bool:
    try:
        parse_value(text, bool)
    except UnfitValueError:
        return False
    return True


def _dictionary_of(name: str, settings: Mapping[str, Setting]) -> Setting | None:
    """The dictionary setting that `tasks.source_type` names an entry of."""
    owner = settings.get(name.split(".", 1)[0]) if "." in name else None
    return owner if owner is not None and any(is_mapping(kind) for kind in holds(owner.kind)) else None


def _check_name(name: str, settings: Mapping[str, Setting]) -> None:
    if name in settings or name == CONFIG_FILE or _dictionary_of(name, settings) is not None:
        return
    near = difflib.get_close_matches(name, settings, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else "see --help"
    raise ConfigError(f"expected the name of a setting, got {name!r}; {advice} (--help lists all of them)")


def _set_value(
    values: dict[str, object], given: set[str], name: str, text: str, settings: Mapping[str, Setting]
) -> None:
    owner = _dictionary_of(name, settings)
    if owner is not None and name not in settings:
        # the first entry that is set begins a new dictionary: it does not mix with the preset or the default
        current: object = values[owner.name] if owner.name in given else {}
        if not isinstance(current, dict):
            raise ConfigError(
                f"expected {owner.name} to be one dictionary, got {values[owner.name]!r}; put {name} into its JSON"
            )
        entries = cast("dict[str, object]", current)
        values[owner.name] = {**entries, name.split(".", 1)[1]: _entry(text)}
        given.add(owner.name)
        return
    try:
        values[name] = parse_value(text, settings[name].kind)
    except UnfitValueError as error:
        meaning = f" ({settings[name].doc})" if settings[name].doc else ""
        default = settings[name].default
        advice = "see --help" if default is REQUIRED else f"for example {name}={as_argument(default)}"
        raise ConfigError(f"expected {name} to be {error}{meaning}, got {text!r}; {advice}") from None
    given.add(name)


def _entry(text: str) -> object:
    """A dictionary's entry: JSON where it is JSON, else text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _construct(config_class: type[Config], values: Mapping[str, object]) -> Config:
    try:
        return chz.Blueprint(config_class).apply(values).make()
    except ConfigError:
        raise
    except (EntrypointException, ValueError, TypeError) as error:
        raise ConfigError(str(error).strip()) from error
