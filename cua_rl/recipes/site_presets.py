"""What training on web pages presets: held-out tasks of the same site, and room for a page in the tiny model."""

from collections.abc import Mapping, Sequence

from cua_rl.errors import ConfigError
from cua_rl.recipes.command_line import given_names, parse_command_line
from cua_rl.recipes.train_config import CLIConfig
from cua_rl.tasks.source_config import find_site

_TINY_MODEL: dict[str, object] = {"max_model_len": 4096, "browser_scale": 1.2}
"""It knows no word of the browser's tool description, which is 1,400 bytes to it; of a page it sees little."""


def site_presets(arguments: Sequence[str], presets: Mapping[str, object]) -> dict[str, object]:
    """What takes the place of `presets` if the tasks on this command line run on web pages."""
    if "tasks" not in given_names(arguments):
        return {}
    try:
        tasks = parse_command_line(CLIConfig, arguments, presets).tasks
        site = find_site(tasks)
    except ConfigError:
        return {}  # the recipe itself will say what is wrong
    if site is None:
        return {}
    held_out = None if site == "page" else tasks  # pages of the user's own are the same for every seed
    return {"eval_tasks": held_out} | (_TINY_MODEL if presets else {})
