"""Write the skeleton of an environment of your own: `python -m cua_rl.recipes.new_environment name=my_app`.

The folder is a package that works as it is: a device, a task with its check, an entry point and a test
(docs/first_environment.md). Nothing of this package changes.
"""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.environments.table import ENVIRONMENTS, SOURCES
from cua_rl.run_folder.log_directory import new_folder
from cua_rl.types.errors import ConfigError, boundary

_SKELETON = Path(__file__).parent / "skeleton"
_FILES = {"environment.txt": "{}.py", "test.txt": "test_{}.py", "pyproject.txt": "pyproject.toml"}


@chz.chz
class NewEnvironmentConfig:
    """Write the skeleton of an environment of your own."""

    name: str = chz.field(doc="name of the environment, its module and its task source, such as my_app")
    folder: str | None = setting(None, "folder to write; it must be empty or not exist; None is ./<name>")


async def cli_main(config: NewEnvironmentConfig) -> None:
    """Check the name and write the files; raises `ConfigError`."""
    name = config.name
    is_module_name = re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name) and not iskeyword(name)  # a package's name, too
    # a folder of that name here is found, too, but without an origin
    if not is_module_name or name in ENVIRONMENTS or name in SOURCES or getattr(find_spec(name), "origin", None):
        raise ConfigError(
            "name: expected that of a new Python module in lower case, such as my_app, which no environment, no task "
            f"source and no installed module has, got {name!r}; choose another"
        )
    folder = new_folder("folder", config.folder or name)
    with boundary(ConfigError, f"folder: write {str(folder)!r}"):
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in _FILES.items():
            text = Template((_SKELETON / source).read_text(encoding="utf-8")).substitute(name=name)
            (folder / target.format(name)).write_text(text, encoding="utf-8")
    print(f"wrote {folder}: {', '.join(target.format(name) for target in _FILES.values())}")
    print(f"next: python -m pip install -e {folder} && python -m pytest {folder}, then")
    print(f"python -m cua_rl.recipes.train tasks.source_type={name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(NewEnvironmentConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
