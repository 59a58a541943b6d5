"""Train on a gym server with gbox-mini-agent: what `train.sh` runs, a thin layer of short flags over `recipes.train`.

Each flag is also an environment variable in upper case (MODEL_BASE_URL); flags win. Everything else on the command
line goes to `recipes.train` as it stands.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence

from cua_rl.command_line.parsing import CONFIG_FILE, HELP_WORDS
from cua_rl.command_line.recipe import quiet_if_nobody_reads, report_error
from cua_rl.host.environment_file import load_environment_file
from cua_rl.recipes import train
from cua_rl.types.errors import ConfigError

FLAGS: Mapping[str, tuple[str, ...]] = {
    "gym_base_url": ("gym",),
    "gym_id": ("gym_id",),
    "gbox_mini_agent_base_url": ("gbox_mini_url", "gbox_mini_agent_base_url"),
    "gbox_mini_agent_agent": ("gbox_agent",),
    "gbox_mini_agent_standard_action_space": ("standard_action_space",),
    "base_url": ("model_base_url", "inference_base_url"),
    "model_name": ("model_name",),
    "monitor_base_url": ("monitor_base_url",),
    "project_id": ("project_id",),
    "project_token": ("project_token",),
    "groups_per_batch": ("batch_size",),
    "max_concurrent_rollouts": ("max_concurrent_rollouts",),
    "max_turns": ("max_turns",),
    "task_timeout_s": ("max_task_time",),
    "turn_timeout_s": ("max_step_time",),
    "max_images": ("limit_mm_per_prompt",),
    "tasks.train_ratio": ("gym_train_ratio",),
    "tasks.eval_number_range": ("gym_eval_number_range",),
    "tasks.seed": ("gym_seed",),
    "tasks.limit": ("gym_limit",),
    "tasks.tags": ("gym_tags",),
}
"""Flags for each setting of `recipes.train`."""

GYM_RUN = {"tasks.source_type": "gym", "agent": "mini_agent"}
"""Defaults of a run on a gym server; the command line or a file overrides them."""

_SETTING_OF = {flag: setting for setting, flags in FLAGS.items() for flag in flags}
_READ_BY_RECIPE = ("monitor_base_url", "project_id", "project_token")  # which looks into the environment itself


def translate(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The arguments for `recipes.train`: flags under the names of settings, those from the environment first."""
    found = {flag: environ.get(flag.upper(), "") for flag in _SETTING_OF if flag not in _READ_BY_RECIPE}
    arguments = [_as_setting(flag, value) for flag, value in found.items() if value]
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, separator, value = _split(argument)
        if name not in _SETTING_OF:
            arguments.append(argument)
        elif separator:
            arguments.append(_as_setting(name, value))
        elif argument.startswith("--") and rest and not rest[0].startswith("--"):
            arguments.append(_as_setting(name, rest.pop(0)))
        else:
            raise ConfigError(f"expected a value after {argument!r}, got none; write --{name.replace('_', '-')}=...")
    names = {_split(argument)[0] for argument in arguments}
    if {CONFIG_FILE, "tasks"} & names:
        return arguments
    return [f"{name}={value}" for name, value in GYM_RUN.items() if name not in names] + arguments


async def served_model(base_url: str) -> str:
    """Folder or hub id of the model served by a vLLM server; raises `ConfigError`."""
    from cua_rl.sampling.server import ExternalServer  # slow to import, and needed only without --model-name

    async with ExternalServer(base_url) as server:
        if server.model.root is None:
            raise ConfigError(
                f"model_name: expected the server at {base_url!r} to say which model it serves, got none; add "
                "--model-name"
            )
        return server.model.root


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; without --model-name, the model server is asked which model it serves."""
    given = sys.argv[1:] if argv is None else argv
    if any(argument in HELP_WORDS for argument in given):
        with quiet_if_nobody_reads():
            print(format_flags())
        return train.main(["--help"])
    try:
        load_environment_file()
        arguments = translate(given)
        named = {name: value for name, _, value in map(_split, arguments)}
        if "base_url" in named and not {"model_name", CONFIG_FILE} & set(named):
            arguments.append(f"model_name={asyncio.run(served_model(named['base_url']))}")
    except ConfigError as error:
        return report_error(error)
    return train.main(arguments)


def format_flags() -> str:
    """The flags, for --help."""
    lines = ["Flags, each also an environment variable in upper case:"]
    for setting, flags in FLAGS.items():
        names = ", ".join(f"--{flag.replace('_', '-')}" for flag in flags)
        lines.append(f"  {names}: {setting}")
    preset = " ".join(f"{name}={value}" for name, value in GYM_RUN.items())
    return "\n".join([*lines, f"Without a file of settings or tasks, they go with {preset}.", ""])


def _as_setting(flag: str, value: str) -> str:
    """The flag and its value as an argument of the recipe; of limits per kind of input, that of images counts."""
    if flag == "limit_mm_per_prompt":
        try:
            value = str(int(json.loads(value)["image"]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"limit_mm_per_prompt: expected a limit of images, such as '{{\"image\": 64}}', got {value!r}; correct "
                "it"
            ) from None
    return f"{_SETTING_OF[flag]}={value}"


def _split(argument: str) -> tuple[str, str, str]:
    """Name, separator and value of an argument, whichever way it is written."""
    name, separator, value = argument.removeprefix("--").partition("=")
    return name.replace("-", "_").removeprefix("rollout."), separator, value


if __name__ == "__main__":
    sys.exit(main())
