"""Tasks, and the templates that make them: one task for every seed."""

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from cua_rl.environments.device import Device
from cua_rl.environments.pool import DeviceRequest
from cua_rl.tasks.fields import Fields
from cua_rl.types.json_values import is_object
from cua_rl.types.judgement import Validation
from cua_rl.types.snapshot import Snapshot

Category = Literal["system", "navigation", "settings", "app", "input"]
Difficulty = Literal["easy", "medium", "hard"]

HEADER_KEYS = ("task_id", "instruction", "max_turns", "check", "category", "difficulty", "tags", "item")
"""Keys that every task in a dictionary may have."""
DEFAULT_MAX_TURNS = 10

Prepare = Callable[[Device], Awaitable[None]]
Validate = Callable[[Device, str | None], Awaitable[Validation]]
Read = Callable[[Device], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task instance: all members of a group run it from the same `seed`, which fixes layout, names and states.

    `validate` reads the device's state, never the agent's claim; `answer` is the agent's final message, for tasks that
    ask a question. Without it, a judge decides from screenshots.
    """

    task_id: str
    """The template, such as "train_01_open_settings"; instances of one template differ in `seed`."""
    seed: int
    instruction: str
    category: Category
    difficulty: Difficulty
    max_turns: int
    validate: Validate | None
    tags: tuple[str, ...] = ()
    prepare: Prepare | None = None
    """Runs on the leased device before the agent sees it."""
    milestones: tuple[Validate, ...] = ()
    """Sub-goals on the way, which `validate` does not need; asked with None as the answer."""
    read_instruction: Read | None = None
    """Reads the instruction from the prepared device, if only the device has it; None: `instruction` is used."""
    world: object = None
    """What its environment makes the device from, such as the initial state of a simulated phone."""
    item: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Fields that graders compare with, such as a reference answer; agents do not see them."""

    def turns_within(self, limit: int) -> int:
        """The turns that a rollout may take in a run that allows so many."""
        return min(self.max_turns, limit)

    def device_request(self, rollout_id: str = "", snapshot: Snapshot | None = None) -> DeviceRequest:
        return DeviceRequest(
            task_id=self.task_id, seed=self.seed, world=self.world, rollout_id=rollout_id, snapshot=snapshot
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Template(ABC):
    """Makes a task for every seed; if the seed has no effect, the tasks differ only in their seed."""

    task_id: str
    category: Category
    difficulty: Difficulty
    max_turns: int
    tags: tuple[str, ...] = ()
    item: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """As of its tasks."""

    @abstractmethod
    def make_task(self, seed: int) -> Task:
        """The task of this seed."""

    @property
    def is_judged(self) -> bool:
        """Whether its tasks have no validator, so that only a judge can decide them."""
        return False

    @property
    def categories(self) -> frozenset[str]:
        """Everything that a source's `category` may name."""
        return frozenset({self.category})

    @property
    def short_name(self) -> str:
        """The id without its set: "02_enable_wifi" of "train_02_enable_wifi" or "demo/02_enable_wifi"."""
        _, number, rest = self._name_parts()
        return f"{number}_{rest}" if number else rest

    def is_called(self, name: str) -> bool:
        """Whether a name matches: "2", "enable_wifi" and "02_enable_wifi" all match "train_02_enable_wifi"."""
        _, number, rest = self._name_parts()
        is_number = name.isdigit() and number.isdigit() and int(name) == int(number)
        return is_number or name in (self.task_id, self.short_name, rest)

    def has_tags(self, tags: Sequence[str]) -> bool:
        """Whether the tags of a source select it: it must have them all."""
        return set(tags) <= set(self.tags)

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """Lower-case names that belong to one split only; none on seeded devices, whose seeds separate the splits."""
        return frozenset() if is_seeded else frozenset({self.task_id})

    def build_task(
        self,
        seed: int,
        instruction: str,
        *,
        validate: Validate | None,
        prepare: Prepare | None = None,
        milestones: tuple[Validate, ...] = (),
        read_instruction: Read | None = None,
        world: object = None,
    ) -> Task:
        """A task with the fields filled in that are the same for every seed."""
        return Task(
            task_id=self.task_id,
            seed=seed,
            instruction=instruction,
            category=self.category,
            difficulty=self.difficulty,
            max_turns=self.max_turns,
            validate=validate,
            tags=self.tags,
            prepare=prepare,
            milestones=milestones,
            read_instruction=read_instruction,
            world=world,
            item=self.item,
        )

    def _name_parts(self) -> tuple[str, str, str]:
        """(set, number, rest) of the id; set and number may be empty."""
        found = re.fullmatch(r"(?:(train|eval)_|(?:.*/))?(?:(\d+)_)?(.+)", self.task_id)
        return (found[1] or "", found[2] or "", found[3]) if found else ("", "", self.task_id)


def read_category(given: Fields) -> Category:
    """The category of a task in a dictionary; raises `ConfigError`."""
    return cast("Category", given.choice("category", get_args(Category)) or "app")


def read_difficulty(given: Fields) -> Difficulty:
    """The difficulty of a task in a dictionary; raises `ConfigError`."""
    return cast("Difficulty", given.choice("difficulty", get_args(Difficulty)) or "medium")


def read_item(given: Fields) -> Mapping[str, object]:
    """The fields for graders of a task in a dictionary; raises `ConfigError`."""
    item = given.raw.get("item", {})
    if not is_object(item):
        raise given.error("item", 'an object such as {"reference_answer": "42"}')
    return item
