"""Settings from a YAML file: `--config file.yaml` on any command line, `load_config` in Python.

Keys are names of settings; nested ones may be written with dots or as mappings. What the command line, or the caller,
says wins over the file, the file wins over presets and defaults.
"""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import cast

from cua_rl.errors import ConfigError


def read_config_file(path: Path) -> dict[str, str]:
    """The file's settings as text, as they would stand on a command line.

    Raises:
        ConfigError: the file cannot be read, or is no mapping of names to values.
    """
    import yaml

    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: expected a YAML file, got {str(path)!r} ({error}); check the path") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"config: expected YAML in {str(path)!r}, got {problem}; correct it there") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"config: expected names and values, such as 'group_size: 8', in {str(path)!r}, got a "
            f"{type(content).__name__}; write one setting a line"
        )
    settings = cast("Mapping[object, object]", content)
    return {str(name).replace("-", "_"): as_argument(value) for name, value in settings.items()}


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
