"""Templates of demo tasks: instruction, initial state, goal, and the expert's route."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial, wraps
from random import Random
from typing import Concatenate, ParamSpec

from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.phone.simulator.start import Start
from cua_rl.tasks.goal import Goal, check_goal
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.actions import PressButton, TypeText

P = ParamSpec("P")

_LEVEL_ENDS = (3, 6, 10)
NUM_INSTANCES = 64
"""Number of instances to examine, enough to include every parameter that a template draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapOn:
    """Tap the element with this label."""

    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TapKey:
    """Tap a key of a dialler, a calculator or the on-screen keyboard."""

    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Press the element with this label for long; "" is the free place below the icons."""

    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwipeUp:
    """Swipe from the lower half of the screen to the upper: opens the app drawer on a home page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullShade:
    """Swipe down from the status bar: opens the notifications, and a second time the quick settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideTo:
    """Drag the slider with this label to a share of its track."""

    label: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPage:
    """Swipe to the next (1) or previous (-1) home page."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """End with what a query answers."""

    query: str


Operation = TapOn | TapKey | Hold | SwipeUp | PullShade | SlideTo | TypeText | PressButton | TurnPage | Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What the expert does on a screen ("" is any), if `query` (where given) answers `value`."""

    screen: str
    operation: Operation
    query: str | None = None
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What a template asks for on one phone. `route` is tried in order: the first move that fits is the expert's."""

    instruction: str
    start: Start
    goal: Goal
    route: tuple[Move, ...]

    @property
    def milestones(self) -> tuple[Goal, ...]:
        """To be on each screen that the route leads through; one that the phone begins on holds at once."""
        screens = dict.fromkeys(move.screen for move in self.route if move.screen)
        return tuple(Goal(query="current_screen", expected=screen) for screen in screens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTemplate(Template):
    """A task on the simulated phone; `draw` decides what differs between seeds, such as whom to call."""

    draw: Callable[[Random], Instance]
    undo: Callable[[Goal, Device], Awaitable[None]] | None = None
    """Undoes the goal before a rollout, on devices whose state lasts."""
    needed_turns: int = 0
    """Of the expert, at most."""

    @property
    def level(self) -> int:
        """1 for tasks that need up to 3 turns, 2 up to 6, 3 up to 10, 4 for more."""
        return 1 + bisect_left(_LEVEL_ENDS, self.needed_turns)

    def instance(self, seed: int) -> Instance:
        """What is asked for on the phone of this seed."""
        return self.draw(Random(f"instance-{seed}"))

    def make_task(self, seed: int) -> Task:
        instance = self.instance(seed)
        prepare = None if self.undo is None else partial(self.undo, instance.goal)
        return self.build_task(
            seed,
            instance.instruction,
            validate=partial(check_goal, instance.goal),
            prepare=prepare,
            # a device whose state lasts may not know the simulator's screens
            milestones=() if self.undo else tuple(partial(check_goal, goal) for goal in instance.milestones),
        )

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """Its id and every instruction."""
        if is_seeded:
            return frozenset()
        return frozenset({self.task_id, *(self.instance(seed).instruction.lower() for seed in range(NUM_INSTANCES))})

    def is_readable(self, device: DeviceAbilities) -> bool:
        """Whether a device with these abilities can answer the query of the goal."""
        query = self.instance(0).goal.query
        return device.queries is None or query.partition(":")[0] in device.queries


def family(
    *, max_turns: int, category: Category = "app", difficulty: Difficulty = "medium", tags: tuple[str, ...]
) -> Callable[[Callable[Concatenate[Random, P], Instance]], Callable[Concatenate[str, P], TaskTemplate]]:
    """Turn a function that draws an instance into one that makes a template: from a task id and the other arguments."""

    def decorate(draw: Callable[Concatenate[Random, P], Instance]) -> Callable[Concatenate[str, P], TaskTemplate]:
        @wraps(draw)
        def make_template(task_id: str, /, *args: P.args, **kwargs: P.kwargs) -> TaskTemplate:
            return TaskTemplate(
                task_id=task_id,
                category=category,
                difficulty=difficulty,
                max_turns=max_turns,
                draw=lambda random: draw(random, *args, **kwargs),
                tags=tags,
            )

        return make_template

    return decorate


def tap(screen: str, label: str, query: str | None = None, value: str = "") -> Move:
    return Move(screen=screen, operation=TapOn(label=label), query=query, value=value)


def type_in(screen: str, text: str, query: str | None = None, value: str = "") -> Move:
    return Move(screen=screen, operation=TypeText(text=text), query=query, value=value)
