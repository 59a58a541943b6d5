"""Families of templates in the notifications and the quick settings: one function per kind of task."""

from collections.abc import Callable
from random import Random

from cua_rl.devices.simulator.catalog import QUICK_TILES, Toggle
from cua_rl.devices.simulator.start import Start
from cua_rl.tasks.demo.system_route import system_template, truth
from cua_rl.tasks.demo.template import Instance, Move, PullShade, TapOn, TaskTemplate, always
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Difficulty

_PULL = Move(screen="home", deed=PullShade())
_PULL_AGAIN = Move(screen="notifications", deed=PullShade())
_SPOKEN = {**QUICK_TILES, Toggle.AIRPLANE_MODE: "Airplane mode", Toggle.DO_NOT_DISTURB: "Do not disturb"}


def open_notifications(task_id: str) -> TaskTemplate:
    """Pull the notification shade down."""
    return _shade(task_id, "Open the notifications.", Goal(query="shade", expected="notifications"), difficulty="easy")


def open_quick_settings(task_id: str) -> TaskTemplate:
    """Pull the shade down twice."""
    goal = Goal(query="shade", expected="quick_settings")
    return _shade(task_id, "Open the quick settings.", goal, _PULL_AGAIN, difficulty="easy")


def clear_notifications(task_id: str) -> TaskTemplate:
    """Get rid of all notifications."""
    goal = Goal(query="notification_count", expected="0")
    clear = Move(screen="notifications", deed=TapOn(label="Clear all"))
    return _shade(task_id, "Clear all notifications.", goal, clear, difficulty="medium")


def switch_quick_tile(task_id: str, toggle: Toggle, *, turn_on: bool) -> TaskTemplate:
    """Switch a toggle by its tile; switching it in Settings does not count."""
    return _tile_template(task_id, lambda random: _tile_instance(toggle, turn_on=turn_on))


def toggle_quick_tile(task_id: str, toggle: Toggle) -> TaskTemplate:
    """Switch a toggle by its tile, on some phones on and on others off."""
    return _tile_template(task_id, lambda random: _tile_instance(toggle, turn_on=random.random() < 0.5))


def _tile_template(task_id: str, draw: Callable[[Random], Instance]) -> TaskTemplate:
    return system_template(task_id, draw, num_turns=3, category="system", tag="quick_tile")


def _tile_instance(toggle: Toggle, *, turn_on: bool) -> Instance:
    on, off = ((), (toggle,)) if turn_on else ((toggle,), ())
    return Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} {_SPOKEN[toggle]} with its tile in the quick settings.",
        start=Start(on=on, off=off),
        goal=Goal(query=f"quick_tile:{toggle.value}", expected=truth(turn_on)),
        route=(_PULL, _PULL_AGAIN, Move(screen="quick_settings", deed=TapOn(label=QUICK_TILES[toggle]))),
    )


def _shade(task_id: str, instruction: str, goal: Goal, *moves: Move, difficulty: Difficulty) -> TaskTemplate:
    route = (_PULL, *moves)
    draw = always(Instance(instruction=instruction, start=Start(), goal=goal, route=route))
    return system_template(
        task_id, draw, num_turns=len(route), category="system", difficulty=difficulty, tag="notifications"
    )
