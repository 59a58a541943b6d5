"""Loading tasks: which templates a source selects, and which instance runs at which step."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import cast

from cua_rl.environments.browser.django_admin.templates import ADMIN_TEMPLATES
from cua_rl.environments.browser.miniwob.templates import all_templates, development_templates
from cua_rl.environments.browser.page_tasks import load_page_tasks
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.gym.server import DEFAULT_BASE_URL, DEFAULT_GYM_ID, fetch_gym_tasks, split_gym_tasks
from cua_rl.environments.harness.tasks import load_harness_tasks
from cua_rl.environments.phone.demo.phone import SIMULATOR
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING, TEMPLATES
from cua_rl.errors import ConfigError
from cua_rl.tasks.custom import DescribedTask, parse_custom_task
from cua_rl.tasks.fields import require_known
from cua_rl.tasks.folders import FolderTask, load_folder_tasks
from cua_rl.tasks.lasting_devices import LastingDeviceTask, held_out_templates
from cua_rl.tasks.source_config import Split, TaskSourceConfig, TaskSources, parse_sources, take_side, task_backend_of
from cua_rl.tasks.task import Task, Template

__all__ = [
    "SEED_RANGES", "SIMULATOR", "Split", "TaskSet", "TaskSourceConfig", "TaskSources", "Template", "load_tasks",
    "parse_sources", "require_disjoint", "tasks_sha256",
]  # fmt: skip

logger = logging.getLogger(__name__)

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
        return any(isinstance(template, DescribedTask) and template.goal is None for template in self.templates)

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
    for config in parse_sources(sources):
        for template in _select(config, seed, device, has_judge):
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


def _select(config: TaskSourceConfig, run_seed: int, device: DeviceAbilities, has_judge: bool) -> Sequence[Template]:
    seed = run_seed if config.seed is None else config.seed
    if task_backend_of(config) != device.task_backend:
        raise ConfigError(
            f"expected tasks that run on {device.name}, got source_type {config.source_type!r}; give training and "
            "evaluation tasks for one kind of device"
        )
    candidates = _fit(_candidates(config, seed, device, has_judge), config, device)
    for name in config.task_names:
        if not any(template.is_called(name) for template in candidates):
            require_known("task name in task_names", name, [template.short_name for template in candidates])
    found = [
        template
        for template in candidates
        if (config.category is None or config.category in template.categories)
        and config.difficulty in (None, template.difficulty)
        and template.has_tags(config.tags)
        and (not config.task_names or any(template.is_called(name) for name in config.task_names))
    ]
    if not found:
        raise ConfigError(
            f"expected at least one task, got none of {len(candidates)} from {config!r}; loosen "
            f"{'train_ratio, ' if config.split_type else ''}category, difficulty, tags or task_names"
        )
    if config.limit is not None and config.limit < len(found):
        kept = sorted(Random(f"limit-{seed}").sample(range(len(found)), config.limit))
        return [found[i] for i in kept]
    return found


def _candidates(config: TaskSourceConfig, seed: int, device: DeviceAbilities, has_judge: bool) -> Sequence[Template]:
    match config.source_type:
        case "demo_training":
            return DEMO_TRAINING
        case "demo_eval":
            return DEMO_EVAL if device.is_seeded else held_out_templates()
        case "demo_all":
            return list(TEMPLATES.values())
        case "ids":
            return [_find(task_id, "task_ids") for task_id in config.task_ids]
        case "file":
            # text without spaces is an id
            return [
                _find(task, where)
                if isinstance(task, str) and not re.search(r"\s", task.strip())
                else _describe(task, where, device, has_judge)
                for where, task in _read_entries(Path(config.file_path or "").expanduser())
            ]
        case "custom":
            described = enumerate(config.custom_tasks, start=1)
            return [_describe(task, f"custom task {i}", device, has_judge) for i, task in described]
        case "task_adapter":
            return _read_folders(config, seed, device)
        case "miniwob" | "django_admin" | "page" | "desktop" | "harness":
            return _site_tasks(config, seed)
        case "gym":
            tasks = fetch_gym_tasks(config.gym_base_url or DEFAULT_BASE_URL, config.gym_id or DEFAULT_GYM_ID)
            # split before filtering, so that a filter moves no task to the other side
            train, held_out = split_gym_tasks(
                tasks, seed=seed, train_ratio=config.train_ratio, eval_number_range=config.eval_number_range
            )
            return tasks if config.split_type is None else train if config.split_type == "train" else held_out


def _site_tasks(config: TaskSourceConfig, seed: int) -> Sequence[Template]:
    match config.source_type:
        case "desktop":
            from cua_rl.environments.desktop.templates import DESKTOP_TASKS  # needs packages of its own

            return DESKTOP_TASKS
        case "miniwob":
            return all_templates() if config.task_names or "measuring" in config.tags else development_templates()
        case "django_admin":
            return ADMIN_TEMPLATES
        case "harness":
            return load_harness_tasks(config, seed)
        case _:
            return take_side(load_page_tasks(config), config, seed)


def _fit(candidates: Sequence[Template], config: TaskSourceConfig, device: DeviceAbilities) -> list[Template]:
    """The tasks that the device supports; of demo sets, others are left out, and single tasks are refused."""
    if device.is_seeded:
        return list(candidates)
    fitting = [LastingDeviceTask.of(task) if isinstance(task, TaskTemplate) else task for task in candidates]
    unreadable = [task for task in fitting if isinstance(task, LastingDeviceTask) and not task.is_readable(device)]
    if unreadable:
        names = ", ".join(task.task_id for task in unreadable)
        if not config.source_type.startswith("demo_"):
            raise ConfigError(f"expected tasks whose goals {device.name} can read, got {names}; choose others")
        logger.warning("left out %d tasks whose goals %s cannot read: %s", len(unreadable), device.name, names)
    return [task for task in fitting if task not in unreadable]


def _read_folders(config: TaskSourceConfig, seed: int, device: DeviceAbilities) -> list[FolderTask]:
    if not device.has_shell:
        raise ConfigError(
            f"expected a device with a shell for source_type 'task_adapter', got {device.name}: validators in folders "
            "run commands on an Android device; choose such a device, or custom tasks"
        )
    tasks = load_folder_tasks(Path(config.tasks_dir or ""))
    if config.category is not None:
        known = dict.fromkeys([task.set_name for task in tasks] + [task.category for task in tasks])
        require_known("set or category of task folders", config.category, known)
    return take_side(tasks, config, seed)


def _read_entries(path: Path) -> Iterator[tuple[str, object]]:
    """Ids and descriptions, each with its place for messages: a JSON list, JSON lines, or lines of text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a file with tasks at {str(path)!r}, got {error}; check file_path") from error
    if path.suffix == ".json":
        content = _parse_json(text, str(path))
        if not isinstance(content, list):
            raise ConfigError(f"expected a list of tasks in {path}, got {type(content).__name__}; write [...]")
        yield from ((f"task {i} of {path}", entry) for i, entry in enumerate(cast(list[object], content), start=1))
        return
    for i, line in enumerate(text.split("\n"), start=1):
        where = f"line {i} of {path}"
        # in text, # begins a comment after an id and at the start of a line; descriptions may hold it
        before_comment = line.partition("#")[0].strip()
        if path.suffix == ".jsonl" and line.strip():
            yield where, _parse_json(line, where)
        elif path.suffix != ".jsonl" and before_comment:
            yield where, line.strip() if " " in before_comment else before_comment


def _parse_json(text: str, where: str) -> object:
    try:
        return cast(object, json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"expected JSON in {where}, got {text[:80]!r} ({error}); repair it") from None


def _describe(task: object, where: str, device: DeviceAbilities, has_judge: bool) -> DescribedTask:
    custom = parse_custom_task(task, where, device, has_judge=has_judge)
    if custom.task_id in TEMPLATES:
        raise ConfigError(f"expected a task_id of its own in {where}, got {custom.task_id!r}, a demo task; rename it")
    return custom


def _find(task_id: str, where: str) -> TaskTemplate:
    require_known(f"task id in {where}", task_id, TEMPLATES)
    return TEMPLATES[task_id]
