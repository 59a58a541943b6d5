"""Every setting of training has one class and one name, reaches what it is for, and nothing else changes with it."""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

import chz
import pytest

from cua_rl.command_line.fields import walk_settings
from cua_rl.command_line.parsing import make_config
from cua_rl.command_line.settings import Setting, list_settings
from cua_rl.command_line.values import NONE_WORDS, holds, is_mapping, is_sequence
from cua_rl.machine.machine import Machine
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.run.resolve import resolve
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError
from scripts.settings_page import RECIPES

PACKAGE = Path(__file__).parents[2] / "cua_rl"
SETTINGS = {setting.name: setting for setting in list_settings(CLIConfig) if setting.group is None}
PRESETS = {"preset", "model_name", "tasks", "device", "box_type", "loss.name"}
"""Others get new defaults with these; the classes of the configuration have tests of that."""


def another_value(setting: Setting) -> object:
    """A value that differs from the default; the numbers are small, so that no process or batch becomes too large."""
    kind, default = next(one for one in holds(setting.kind) if one is not type(None)), setting.default
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    if is_mapping(kind):
        return {"source_type": "demo_training", "tags": ["demo"]}
    if is_sequence(kind):
        part = next(iter(get_args(kind)), str)
        return (*([0] if part is int else ["merger"] if get_origin(part) is Literal else ["one"]),)
    if kind is bool:
        return not default
    if kind is float:
        return (default or 1.0) / 2 if isinstance(default, float | None) else 0.5
    if kind is int:
        return 4096 if not isinstance(default, int) else default + 1
    return "other"


def resolved(changes: dict[str, object]) -> dict[str, object]:
    """Every setting of a run with these changes, on two GPUs of 80 GB."""
    machine = Machine(gpus=("0", "1"), gpu_gib=80.0, host_gib=64.0)
    config, _ = resolve(make_config(CLIConfig, changes), machine, TINY_QWEN3_VL)
    return {path: value for path, _, value in walk_settings(config) if not chz.is_chz(value)}


@pytest.fixture(scope="module")
def usual() -> dict[str, object]:
    return resolved({})


@pytest.mark.parametrize("path", sorted(SETTINGS.keys() - PRESETS))
def test_a_changed_setting_reaches_the_run_as_it_is_or_is_refused_by_name(path: str, usual: dict[str, object]) -> None:
    value, refusal = another_value(SETTINGS[path]), ""
    try:
        changed = resolved({path: value})
    except ConfigError as error:
        refusal, changed = str(error), usual | {path: value}

    assert changed[path] == value
    assert not refusal or path.rpartition(".")[2] in refusal
    # what was left open may follow; what has a default stays, but for how many rollouts the KV cache holds
    differing = {name for name, now in changed.items() if now != usual[name]} - {path}
    assert {name for name in differing if SETTINGS[name].default is not None} <= {"max_concurrent_rollouts"}


def test_every_setting_is_read_by_something() -> None:
    read = {
        node.attr
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
    }

    # a preset is chosen while the configuration is constructed, from what was given
    assert {path for path in SETTINGS if path.rpartition(".")[2] not in read} == {"preset"}


SAME_WORDS = {"base_url", "dtype", "gpus", "host", "model", "name", "port", "seed", "url"}
"""Settings of several things: the address of the judge, of the monitor, and of the model server, for example."""


def test_no_two_classes_of_the_configuration_declare_the_same_setting() -> None:
    names = [path.rpartition(".")[2] for path in SETTINGS]

    assert {name for name in names if names.count(name) > 1} - SAME_WORDS == set()


def test_the_trainer_gets_what_is_set_beside_its_group_under_the_same_name() -> None:
    machine = Machine(gpus=(), gpu_gib=None, host_gib=8.0)
    given = {"lora_rank": 8, "seed": 3, "server.max_pixels": 65536}

    config, _ = resolve(make_config(CLIConfig, given), machine, TINY_QWEN3_VL)

    assert (config.trainer.lora_rank, config.trainer.seed, config.trainer.max_pixels) == (8, 3, 65536)
    assert config.trainer.model_path == config.server.model_path == TINY_QWEN3_VL


def test_no_choice_of_a_setting_is_written_like_the_absence_of_a_choice() -> None:
    """`sharding=none` would mean that the run chooses."""
    taken = [
        (recipe.config_class.__name__, setting.name)
        for recipe in RECIPES
        for setting in list_settings(recipe.config_class)
        if type(None) in holds(setting.kind)
        and {str(choice) for kind in holds(setting.kind) if get_origin(kind) is Literal for choice in get_args(kind)}
        & set(NONE_WORDS)
    ]

    assert taken == []
