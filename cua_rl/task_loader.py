"""Loading tasks: which templates a source selects, and which instance runs at which step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random

from cua_rl.environments.contract import Loading, Source, Split, SplitSource
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.phone.demo.phone import SIMULATOR
from cua_rl.environments.table import TaskSources, environment_of, parse_sources
from cua_rl.tasks.fields import require_known
from cua_rl.tasks.task import Task, Template
from cua_rl.types.errors import ConfigError, boundary

__all__ = [
    "SEED_RANGES", "SIMULATOR", "Split", "TaskSet", "TaskSources", "Template", "load_tasks", "parse_sources",
    "require_disjoint", "tasks_sha256",
]  # fmt: skip

SEED_RANGES: dict[Split, range] = {"train": range(1_000_000), "eval": range(1_000_000, 2_000_000)}
"""Instance seeds of each split. They are disjoint, so no phone that was trained on is ever evaluated on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Templates and the order in which their instances run: a pure function of seed, split and position."""

    templates: tuple[Template, ...]
    seed: int
    split: Split
    is_seeded: bool = True
    """Instances of a template differ from seed to seed (folder tasks never do)."""

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(template.task_id for template in self.templates)

    @property
    def is_judged(self) -> bool:
        """True if one of the tasks has no validator, so that only a judge can decide it."""
        return any(template.is_judged for template in self.templates)

    @property
    def fixed_names(self) -> frozenset[str]:
        """Names that must not occur in both training and evaluation; see `Template.fixed_names`."""
        return frozenset[str]().union(*(template.fixed_names(is_seeded=self.is_seeded) for template in self.templates))

    def batch(self, number: int, num_tasks: int) -> list[Task]:
        """The tasks of a batch, counted from 0: templates recur equally often, each time with a new seed."""
        first = number * num_tasks
        return [self._instance(position, "batch") for position in range(first, first + num_tasks)]

    def held_out(self, num_tasks: int) -> list[Task]:
        """Tasks to evaluate on: the same instances at every call; a smaller number is a prefix of a larger one."""
        if self.split != "eval":
            raise ConfigError(f"expected a task set of the eval split, got {self.split!r}; load it with split='eval'")
        return [self._instance(position, "held_out") for position in range(num_tasks)]

    def _instance(self, position: int, purpose: str) -> Task:
        round_index, place = divmod(position, len(self.templates))
        order = list(self.templates)
        Random(f"order-{purpose}-{self.seed}-{round_index}").shuffle(order)
        seeds = SEED_RANGES[self.split]
        return order[place].make_task(Random(f"{purpose}-{self.split}-{self.seed}-{position}").choice(seeds))


def load_tasks(
    sources: TaskSources, *, seed: int, split: Split, device: DeviceAbilities = SIMULATOR, has_judge: bool = False
) -> TaskSet:
    """The templates of all sources, each once, in order; raises `ConfigError` for an invalid source, or tasks that
    cannot run on such a device. Descriptions without a check are tasks only where there is a judge.
    """
    templates: dict[str, Template] = {}
    run = Loading(seed=seed, device=device, has_judge=has_judge)
    for source in parse_sources(sources):
        for template in _select(source, run):
            if templates.setdefault(template.task_id, template) != template:
                raise ConfigError(
                    f"expected one task per id, got two different ones called {template.task_id!r}; rename one"
                )
    return TaskSet(templates=tuple(templates.values()), seed=seed, split=split, is_seeded=device.is_seeded)


def tasks_sha256(train: TaskSet, held_out: Sequence[Task]) -> str:
    """Changes if the tasks of a run do although its settings do not: a file was edited, a server has others."""
    identities = [[task.task_id, task.seed, task.instruction] for task in held_out]
    return sha256(json.dumps([train.task_ids, identities]).encode()).hexdigest()


def require_disjoint(train: TaskSet, held_out: TaskSet) -> None:
    """Raise `ConfigError` if something would be both trained and evaluated on.

    Where the seed makes the device, the splits' seeds keep them apart; folder tasks, and all tasks on devices that are
    the same for every seed, must not occur on both sides, nor two tasks of the same instruction.
    """
    shared = train.fixed_names & held_out.fixed_names
    if shared:
        raise ConfigError(
            f"expected different tasks for training and evaluation, got {len(shared)} in both, such as "
            f"{sorted(shared)[:10]!r}; give the one split_type='train' and the other split_type='eval', with the same "
            "seed and train_ratio, or choose other tasks"
        )
    if train.split == held_out.split:
        raise ConfigError(
            f"expected training and evaluation on different seeds, got split {train.split!r} for both; "
            "load one with split='train' and the other with split='eval'"
        )


def _select(source: Source, run: Loading) -> Sequence[Template]:
    seed, device = run.seed if source.seed is None else source.seed, run.device
    environment = environment_of(source)
    if device.environment != (None if environment is None else environment.name):
        raise ConfigError(
            f"expected tasks that run on {device.name}, got source_type {source.source_type!r}; give training and "
            "evaluation tasks for one kind of device"
        )
    with boundary(ConfigError, f"load the tasks of {source!r}"):
        candidates = source.load(replace(run, seed=seed))
    names = [str(name) for name in source.task_names]
    for name in names:
        if not any(template.is_called(name) for template in candidates):
            require_known("task name in task_names", name, [template.short_name for template in candidates])
    found = [
        template
        for template in candidates
        if (source.category is None or source.category in template.categories)
        and source.difficulty in (None, template.difficulty)
        and template.has_tags(source.tags)
        and (not names or any(template.is_called(name) for name in names))
    ]
    if not found:
        split = "train_ratio, " if isinstance(source, SplitSource) and source.split_type is not None else ""
        do = f"loosen {split}category, difficulty, tags or task_names" if candidates else "add tasks there"
        raise ConfigError(f"expected at least one task, got none of {len(candidates)} from {source!r}; {do}")
    if source.limit is not None and source.limit < len(found):
        return [found[i] for i in sorted(Random(f"limit-{seed}").sample(range(len(found)), source.limit))]
    return found
