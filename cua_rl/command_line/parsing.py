"""From a command line or a YAML file to a chz configuration: `key=value`, `--key value`, `--key=value`, `--flag`,
`--config FILE` and `--help`. `gbox_api_key_file=PATH` reads a secret from a file.

Settings in groups have dots (`loss.clip_low=0.3`); underscores do too (`judge_model=...`), and so does the last part
alone where it is unique (`clip_low=0.3`). Lists and dictionaries are JSON (`tasks='{"source_type": "ids"}'`); a list of
words may be `a,b`; entries of a dictionary may be set one by one (`tasks.source_type=ids`). Later arguments win; the
command line wins over files, files over presets and defaults.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import chz

from cua_rl.command_line.settings import (
    NO_PRESETS,
    NO_SECTIONS,
    REQUIRED,
    Sections,
    Setting,
    SettingNames,
    ShownPresets,
    format_help,
)
from cua_rl.command_line.values import UnfitValueError, as_argument, holds, parse_value
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_object, mapping

Config = TypeVar("Config")

CONFIG_FILE = "config"
"""The argument that names a file of settings; no recipe has a setting of this name."""
HELP_WORDS = ("--help", "-h", "help")


def parse_command_line(
    config_class: type[Config],
    argv: Sequence[str],
    shown_presets: ShownPresets = NO_PRESETS,
    sections: Sections = NO_SECTIONS,
) -> Config:
    """Build the configuration.

    Prints the settings of `sections` (or all) and exits with status 0 for `--help`, below them `shown_presets`: what
    the class itself may set. Raises `ConfigError` if a name is unknown, a value has the wrong type or is missing, or a
    rule between settings is broken.
    """
    if asked := [place for place, argument in enumerate(argv) if argument in HELP_WORDS]:
        topics = [argument for argument in argv[asked[0] + 1 :] if "=" not in argument and argument.isidentifier()]
        print(format_help(config_class, sections, shown_presets, topics[0] if topics else None))
        raise SystemExit(0)
    given = GivenValues(config_class)
    arguments = list(_split_arguments(argv, given.names))
    for path in [text for name, text in arguments if name == CONFIG_FILE]:
        given.set_file(Path(path))
    for name, text in arguments:
        if name != CONFIG_FILE:
            given.set_text(name, text)
    return make_config(config_class, given.values)


def load_config(config_class: type[Config], path: Path | str, **given: object) -> Config:
    """The configuration that a YAML file describes; what is `given` here wins over it.

    Raises:
        ConfigError: as for a command line.
    """
    settings = GivenValues(config_class)
    settings.set_file(Path(path))
    # a group that is given whole wins over all its parts in the file
    parts = {
        path: value for path, value in settings.values.items() if not chz.is_chz(given.get(path.partition(".")[0]))
    }
    return make_config(config_class, parts | given)


def make_config(config_class: type[Config], settings: Mapping[str, object]) -> Config:
    """The configuration with these values, under any of the names that a command line takes; raises `ConfigError` if a
    name is unknown, a value is missing, or a rule between settings is broken.
    """
    names = SettingNames(config_class)
    # a group that is given whole stays whole
    values = {name if chz.is_chz(value) else names.find(name).name: value for name, value in settings.items()}
    missing = [name for name, setting in names.all.items() if setting.default is REQUIRED and "." not in name]
    missing = [name for name in missing if not any(key == name or key.startswith(f"{name}.") for key in values)]
    if missing:
        raise ConfigError(f"expected a value for {', '.join(missing)}, got none; add {missing[0]}=...")
    return _construct(config_class, values, names.all, "")


def _construct(
    config_class: type[Config], values: Mapping[str, object], settings: Mapping[str, Setting], prefix: str
) -> Config:
    """Build groups from the inside out, each with what was given only: the class fills in presets and defaults."""
    given: dict[str, object] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if not rest:
            given[name] = value
    for name in dict.fromkeys(path.partition(".")[0] for path in values if "." in path):
        group = settings[prefix + name].group
        assert group is not None, "names have been looked up"
        inner = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{name}.")}
        given[name] = _construct(group, inner, settings, f"{prefix}{name}.")
    try:
        return config_class(**given)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{prefix}{str(error).strip()}") from error


class GivenValues:
    """Collects what files and arguments say, by the full name of each setting."""

    def __init__(self, config_class: type[Any]) -> None:
        self.names = SettingNames(config_class)
        self.values: dict[str, object] = {}

    def set_file(self, path: Path) -> None:
        """Set what a YAML file says; its keys are names of settings, those of groups with dots or as mappings.

        Raises:
            ConfigError: the file cannot be read, is no mapping of names to values, or a value is wrong.
        """
        for name, value in _read_yaml(path).items():
            settings: dict[str, object] = {name: value}
            is_group = name in self.names.all and self.names.all[name].group is not None
            if is_group and (value is None or is_object(value)):  # None: a heading with nothing below it
                settings = {f"{name}.{key}": entry for key, entry in mapping(value).items()}
            for setting, entry in settings.items():
                try:
                    self.set_text(setting, as_argument(entry))
                except ConfigError as error:
                    raise ConfigError(f"{path}: {error}") from None

    def set_text(self, name: str, text: str) -> None:
        """Set what an argument `name=text` says."""
        entry = None if name in self.names.all else self.names.find_entry(name)
        if entry is not None:
            owner, key = entry
            # the first entry that is set begins a new dictionary: it does not mix with the preset or the default
            current = self.values.get(owner.name, {})
            if not is_object(current):
                raise ConfigError(
                    f"expected {owner.name} to be one dictionary, got {current!r}; put {owner.name}.{key} into its JSON"
                )
            try:
                value: object = json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                value = text
            self.values[owner.name] = {**current, key: value}
            return
        secret = self.names.find_file(name)
        if secret is not None:
            self.values[secret.name] = _read_secret(name, Path(text).expanduser())
            return
        setting = self.names.find(name)
        try:
            self.values[setting.name] = parse_value(text, setting.kind)
        except UnfitValueError as error:
            meaning = f" ({setting.doc})" if setting.doc else ""
            example = as_argument(setting.default)
            advice = "see --help" if setting.default is REQUIRED else f"for example {name}={example}"
            advice = advice if setting.group is None else f"--help {setting.name} lists them"
            raise ConfigError(f"expected {name} to be {error}{meaning}, got {text!r}; {advice}") from None


def _read_secret(name: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: expected a file, got {str(path)!r} ({error}); check the path") from None
    if not text or "\n" in text:
        raise ConfigError(f"{name}: expected one line in {str(path)!r}, got more or none; write only the secret")
    return text


def _read_yaml(path: Path) -> dict[str, object]:
    import yaml  # most runs have no file

    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: expected a YAML file, got {str(path)!r} ({error}); check the path") from None
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"config: expected YAML in {str(path)!r}, got {problem}; correct it there") from None
    if content is None:
        return {}
    if not is_object(content):
        raise ConfigError(
            f"config: expected names and values, such as 'group_size: 8', in {str(path)!r}, got a "
            f"{type(content).__name__}; write one setting a line"
        )
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _split_arguments(argv: Sequence[str], names: SettingNames) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each argument, whichever way it is written."""
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name = argument.removeprefix("--").split("=", 1)[0].replace("-", "_")
        if not argument.startswith("--") and "=" not in argument:
            raise ConfigError(f"expected key=value or --key value, got {argument!r}; --help lists the settings")
        is_setting = name != CONFIG_FILE and names.find_entry(name) is None and names.find_file(name) is None
        kind = names.find(name).kind if is_setting else str  # an unknown name is reported before a missing value
        if "=" in argument:
            yield name, argument.split("=", 1)[1]
        elif bool in holds(kind) and not (rest and _is_bool(rest[0])):
            yield name, "true"
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"expected a value after {argument!r}, got none; write {name}=...")
        else:
            yield name, rest.pop(0)


def _is_bool(text: str) -> bool:
    try:
        parse_value(text, bool)
    except UnfitValueError:
        return False
    return True
