"""A task template: what is asked, how the phone begins, how it is checked, how it is solved."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from cua_rl.actions import Button
from cua_rl.devices.device import Device
from cua_rl.devices.simulator.start import Start
from cua_rl.tasks.task import Category, Difficulty, Task
from cua_rl.types import Validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a query must answer in the end.

    `how`: "equals"; "includes" (the answer is a JSON list with an item equal to `expected`, itself JSON); or "told"
    (the agent's final message must contain what the query answers, and that must be `expected`, where it is given).
    """

    query: str
    expected: str = ""
    how: Literal["equals", "includes", "told"] = "equals"

    def is_met(self, actual: str, answer: str | None) -> bool:
        """Compare what the query answered, and for questions what the agent said."""
        match self.how:
            case "equals":
                return actual == self.expected
            case "includes":
                return json.loads(self.expected) in json.loads(actual)
            case "told":
                is_right = self.expected in ("", actual)
                return is_right and answer is not None and _contains_words(answer.replace("%", " "), actual)


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
class TypeIn:
    """Type into the focused field."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushButton:
    """Press a system button."""

    button: Button


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPage:
    """Swipe to the next (1) or previous (-1) home page."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """End with what a query answers."""

    query: str


Deed = TapOn | TapKey | Hold | SwipeUp | PullShade | SlideTo | TypeIn | PushButton | TurnPage | Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What the expert does on a screen ("" is any), if `query` (where given) answers `value`."""

    screen: str
    deed: Deed
    query: str | None = None
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What a template asks for on one phone. `route` is tried in order: the first move that fits is the expert's."""

    instruction: str
    start: Start
    goal: Goal
    route: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTemplate:
    """A task for every seed; `draw` decides what differs between seeds, such as whom to call or when to wake."""

    task_id: str
    category: Category
    difficulty: Difficulty
    max_turns: int
    draw: Callable[[Random], Instance]
    tags: tuple[str, ...] = ()

    def instance(self, seed: int) -> Instance:
        """What is asked for on the phone of this seed."""
        return self.draw(Random(f"instance-{seed}"))

    def make_task(self, seed: int) -> Task:
        """The task on the phone of this seed."""
        instance = self.instance(seed)
        return Task(
            task_id=self.task_id,
            seed=seed,
            instruction=instance.instruction,
            category=self.category,
            difficulty=self.difficulty,
            max_turns=self.max_turns,
            validate=partial(_validate, instance.goal),
            tags=self.tags,
        )


def always(instance: Instance) -> Callable[[Random], Instance]:
    """A `draw` for templates whose instances differ in nothing but the phone."""
    return lambda random: instance


def _contains_words(text: str, wanted: str) -> bool:
    """Whether the words of `wanted` stand in `text`, in order and whole; punctuation at their ends does not matter."""
    said, words = ([word.strip(".,;:!?\"'()") for word in part.split()] for part in (text, wanted))
    return bool(words) and any(said[i : i + len(words)] == words for i in range(len(said)))


async def _validate(goal: Goal, device: Device, answer: str | None) -> Validation:
    started = time.monotonic()
    actual = await device.query(goal.query)
    success = goal.is_met(actual, answer)
    return Validation(
        query=goal.query,
        expected=actual if goal.how == "told" else goal.expected,
        actual=(answer or "") if goal.how == "told" else actual,
        success=success,
        duration_s=time.monotonic() - started,
    )
