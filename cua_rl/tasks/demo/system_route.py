"""What templates on system pages share: the way through Settings, and how many turns it takes."""

from collections.abc import Callable, Sequence
from random import Random

from cua_rl.devices.simulator.catalog import EXTRA_ROWS, Toggle
from cua_rl.devices.simulator.start import Start, SystemStart
from cua_rl.tasks.demo.template import Deed, Instance, Move, TapOn, TaskTemplate
from cua_rl.tasks.task import Category, Difficulty

OPEN_SETTINGS = Move(screen="home", deed=TapOn(label="Settings"))
SCROLL_TURNS = 3
"""Swipes that Settings, with all its rows, takes at most."""
LIST_TURNS = 4
"""Swipes that a list of all apps takes at most."""
_SLACK_TURNS = 3


def system_template(
    task_id: str,
    draw: Callable[[Random], Instance],
    *,
    num_turns: int,
    category: Category = "settings",
    difficulty: Difficulty = "medium",
    tag: str,
) -> TaskTemplate:
    """A template whose expert takes at most `num_turns`; agents get a few more."""
    return TaskTemplate(
        task_id=task_id,
        category=category,
        difficulty=difficulty,
        max_turns=num_turns + _SLACK_TURNS,
        draw=draw,
        tags=("system_task", tag),
    )


def settings_row(name: str, *moves: Move) -> tuple[Move, ...]:
    """The route to the page behind an extra row of Settings, and on."""
    return OPEN_SETTINGS, Move(screen="settings", deed=TapOn(label=EXTRA_ROWS[name].label)), *moves


def on_page(page: str, deed: Deed, query: str | None = None, value: str = "") -> Move:
    """What to do on a page of Settings."""
    return Move(screen=f"settings/{page}", deed=deed, query=query, value=value)


def tap_on(page: str, label: str) -> Move:
    """Tap an element on a page of Settings."""
    return on_page(page, TapOn(label=label))


def system_start(*, on: Sequence[Toggle] = (), system: SystemStart) -> Start:
    """A phone with system pages; Wi-Fi is never asked for in airplane mode."""
    return Start(on=tuple(on), off=(Toggle.AIRPLANE_MODE,) if Toggle.WIFI in on else (), system=system)


def truth(value: bool) -> str:
    """How queries write a truth value."""
    return "true" if value else "false"
