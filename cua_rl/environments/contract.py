"""The contract of an environment: its task sources, its devices, and what a run must know about it beforehand.

Each folder beside this module holds environments, which know nothing of one another; `environments/table.py` lists
them. Other packages add theirs with an entry point (docs/devices.md).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal, TypeVar, get_args

from cua_rl.command_line.fields import Given
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.device import AttachDevice, DeviceAbilities, Grounder, Screen
from cua_rl.environments.pool import DeviceBackend
from cua_rl.tasks.expert import Experts
from cua_rl.tasks.fields import Fields, given
from cua_rl.tasks.task import Category, Difficulty, Template

_Task = TypeVar("_Task", bound=Template)

BoxType = Literal["android", "linux"]
Split = Literal["train", "eval"]
TRAIN_RATIO = 0.8

PAID_DEVICES: Given = {"max_concurrent_rollouts": 8}
"""Boxes cost money while they run, and gym servers have few devices."""
SMALLEST_PHONE = Screen(kind="android", width_px=720, height_px=1280)
USUAL_PHONE = Screen(kind="android", width_px=1080, height_px=2400)
DESKTOP_SCREEN = Screen(kind="linux", width_px=1024, height_px=768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The run that loads tasks."""

    seed: int
    device: DeviceAbilities
    has_judge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(ABC):
    """Where tasks come from, and which are selected; its fields are the keys of a task source."""

    source_types: ClassVar[tuple[str, ...]]
    """What selects such a source."""
    required: ClassVar[str | None] = None
    """The key without which it makes no sense."""

    source_type: str
    category: str | None = given(lambda item, key: item.choice(key, get_args(Category)))
    difficulty: str | None = given(lambda item, key: item.choice(key, get_args(Difficulty)))
    tags: tuple[str, ...] = given(Fields.texts)
    """Tasks must have all of these; those of a gym one of these."""
    task_names: tuple[object, ...] = given(Fields.items)
    """Tasks must have one of these names: "train_02_enable_wifi", "02_enable_wifi", "enable_wifi" or "2"."""
    limit: int | None = given(lambda item, key: item.integer(key, at_least=1))
    """Keep a random choice of this many tasks, in their order."""
    seed: int | None = given(lambda item, key: item.integer(key, at_least=0))
    """Seed of that choice and of a split; None takes the run's."""

    @abstractmethod
    def load(self, loading: Loading) -> Sequence[Template]:
        """All tasks of the source, before any is selected; raises `ConfigError`. `loading` has the source's seed."""

    def completed(self, settings: DeviceConfig) -> "Source":
        """The source with the settings of the run where it leaves them open."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSource(Source):
    """A source whose tasks are the same for every seed, so that each belongs to training or to evaluation."""

    train_ratio: float = given(lambda item, key: TRAIN_RATIO if (share := item.share(key)) is None else share)
    """Share of the tasks used for training."""
    split_type: str | None = given(lambda item, key: item.choice(key, get_args(Split)))
    """The side of the split; None is both."""

    @property
    def shared_as(self) -> object:
        """What two sources have in common whose tasks a run splits between training and evaluation; None is nothing."""
        return None

    def take_side(self, tasks: Sequence[_Task], seed: int) -> list[_Task]:
        """The tasks on the side that the source names; all of them if it names none."""
        if self.split_type is None:
            return list(tasks)
        training = training_ids((task.task_id for task in tasks), seed, self.train_ratio)
        return [task for task in tasks if (task.task_id in training) == (self.split_type == "train")]


def training_ids(task_ids: Iterable[str], seed: int, train_ratio: float) -> frozenset[str]:
    """Ids of the training split, by a hash of id and seed: adding a task never moves another one.

    With two tasks or more and a ratio other than 0 or 1, neither side is empty: the task nearest to an empty side fills
    it, and only this task may move when others are added.
    """
    digests = {task_id: sha256(f"{seed}/{task_id}".encode()).digest() for task_id in task_ids}
    # pseudo-random, from 0 to 1
    places = {task_id: int.from_bytes(digest[:8], "big") / 2**64 for task_id, digest in digests.items()}
    chosen = frozenset(task_id for task_id, place in places.items() if place < train_ratio)
    if len(places) < 2 or not 0 < train_ratio < 1 or 0 < len(chosen) < len(places):
        return chosen
    return chosen - {max(places, key=places.__getitem__)} or frozenset({min(places, key=places.__getitem__)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrder:
    """What a run asks of its environment."""

    sources: Sequence[Source]
    environments: Mapping[str, "Environment"]
    """All of them, by name."""
    settings: DeviceConfig = field(default_factory=DeviceConfig)
    device: str = "simulator"
    """The configured device, for tasks that bring none."""
    box_type: BoxType = "android"
    gbox_api_key: str | None = None
    is_remote: bool = False
    """An agent elsewhere operates the devices."""
    max_turns: int = 20
    log_path: Path = Path()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def box_screen(order: DeviceOrder) -> Screen:
    """Lower bound on the size of a box's screenshots."""
    return SMALLEST_PHONE if order.box_type == "android" else DESKTOP_SCREEN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Environment:
    """One kind of device and the tasks that run on it."""

    name: str
    """For users and messages, and what `DeviceAbilities.environment` names; with `is_configured`, what `device` is."""
    make_backend: Callable[[DeviceOrder], DeviceBackend]
    """The devices, not yet entered; raises `ConfigError` if they cannot work."""
    sources: tuple[type[Source], ...] = ()
    is_configured: bool = False
    """`device` chooses it, and its tasks run on all such environments; otherwise its tasks bring its devices."""
    is_hosted: bool = False
    """A server has the devices, so that settings of other environments mean nothing."""
    has_tiny_model: bool = False
    """The included model can operate its devices."""
    has_held_out: bool = True
    """Its sources have tasks for evaluation that differ from those for training."""
    presets: Given = field(default_factory=dict[str, object])
    """Defaults of a run's settings."""
    charges: str = ""
    """Who charges for its devices."""
    smallest_screen: Callable[[DeviceOrder], Screen] = box_screen
    """Lower bound on the size of screenshots."""
    experts: Experts | None = None
    """Scripted experts for some of its tasks."""
    check_settings: Callable[[DeviceOrder], None] | None = None
    """Raises `ConfigError` for settings of this environment that go with no run on other devices; run for each."""
    check_workers: Callable[[int, DeviceConfig], None] | None = None
    """Raises `ConfigError` if so many processes cannot share the devices."""
    lease_timeout_s: Callable[[DeviceConfig, int], float] = lambda settings, _: settings.lease_timeout_s
    """Limit for obtaining a device where this many may be asked for at once."""
    open_attach: Callable[[DeviceOrder], AbstractAsyncContextManager[AttachDevice]] | None = None
    """Operates such devices where somebody else has made them; raises `ConfigError` if that cannot work."""
    open_grounder: Callable[[DeviceOrder], AbstractAsyncContextManager[Grounder]] | None = None
    """Finds described elements on screenshots of any environment, if `coordinate_mode` names this one."""
