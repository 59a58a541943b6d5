"""Task sources: `TaskSourceConfig`, and parsing it from dictionaries and JSON."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Literal, TypeVar, cast, get_args

from cua_rl.errors import ConfigError
from cua_rl.tasks.fields import Fields, join_names, read_mapping
from cua_rl.tasks.task import Category, Difficulty, Template

_Task = TypeVar("_Task", bound=Template)

SourceType = Literal[
    "demo_training", "demo_eval", "demo_all", "ids", "file", "custom", "task_adapter", "gym", "miniwob", "django_admin",
    "page", "desktop", "harness",
]  # fmt: skip
TaskBackendName = Literal["miniwob", "django_admin", "page", "desktop", "gym", "harness"]
"""Sources whose tasks bring their own devices: web pages, desktops, devices of a gym server, harnesses."""
Split = Literal["train", "eval"]
TaskSources = str | Mapping[str, object] | Sequence[Mapping[str, object]]
"""One source or several, as dicts or as their JSON text."""

TRAIN_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSourceConfig:
    """Where tasks come from, and which are selected. Tasks are split before they are filtered."""

    source_type: SourceType
    task_ids: tuple[str, ...] = ()
    """For "ids"."""
    file_path: str | None = None
    """For "file": an id per line (# begins a comment) or, where there is a judge, a description; or .json and .jsonl
    with ids or custom tasks. For "harness": a .jsonl file with rows, or a folder of such files. For "page", instead of
    `pages`: a .json or .jsonl file, or a folder with tasks.json or other such files."""
    list_command: str | None = None
    """For "harness": a command that prints its rows, instead of `file_path`."""
    custom_tasks: tuple[object, ...] = ()
    """For "custom": dictionaries as `cua_rl.tasks.custom` reads them; where there is a judge, also descriptions."""
    pages: tuple[object, ...] = ()
    """For "page": dictionaries as `cua_rl.environments.browser.page_tasks` reads them."""
    allowed_urls: tuple[str, ...] = ()
    """For "page": prefixes of addresses that pages may request; () allows the tasks' own hosts."""
    site_command: str | None = None
    """For "page": command that starts the server of each page, in the tasks' folder; `{port}` is its port."""
    reset: str | None = None
    """For "page" with `site_command`: a request such as "POST /api/reset", or a command, before a server is used again;
    None starts a new one for every rollout."""
    tasks_dir: str | None = None
    """For "task_adapter": folders <set>/<nn_name> with task.py and validator.py, or one such set."""
    train_ratio: float = TRAIN_RATIO
    """For folders, gyms, harnesses and pages: share of the tasks used for training."""
    split_type: Split | None = None
    """For folders, gyms, harnesses and pages: the side of the split; None is both."""
    category: str | None = None
    """A category; for "task_adapter" it may also be the name of a set."""
    difficulty: Difficulty | None = None
    tags: tuple[str, ...] = ()
    """Tasks must have all of these; those of a gym one of these."""
    task_names: tuple[str, ...] = ()
    """Tasks must have one of these names: "train_02_enable_wifi", "02_enable_wifi", "enable_wifi" or "2"."""
    limit: int | None = None
    """Keep a random choice of this many tasks, in their order."""
    seed: int | None = None
    """Seed of that choice and of a folder's split; None takes the run's."""
    gym_base_url: str | None = None
    """For "gym": address of the server; None is http://localhost:5010."""
    gym_id: str | None = None
    """For "gym": which of its gyms; None is "umetrip"."""
    eval_number_range: str | None = None
    """For "gym": the task numbers that are for evaluation, such as "001-032"; instead of `train_ratio`."""


_BELONGS_TO: dict[str, tuple[SourceType, ...]] = {
    "task_ids": ("ids",),
    "file_path": ("file", "harness", "page"),
    "list_command": ("harness",),
    "custom_tasks": ("custom",),
    "pages": ("page",),
    "allowed_urls": ("page",),
    "site_command": ("page",),
    "reset": ("page",),
    "tasks_dir": ("task_adapter",),
    "train_ratio": ("task_adapter", "gym", "harness", "page"),
    "split_type": ("task_adapter", "gym", "harness", "page"),
    "gym_base_url": ("gym",),
    "gym_id": ("gym",),
    "eval_number_range": ("gym",),
}
_REQUIRED = {"ids": "task_ids", "file": "file_path", "custom": "custom_tasks", "task_adapter": "tasks_dir"}


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


def take_side(tasks: Sequence[_Task], config: TaskSourceConfig, seed: int) -> list[_Task]:
    """The tasks on the side of the split that the source names; all of them if it names none."""
    if config.split_type is None:
        return list(tasks)
    training = training_ids((task.task_id for task in tasks), seed, config.train_ratio)
    return [task for task in tasks if (task.task_id in training) == (config.split_type == "train")]


def parse_sources(sources: TaskSources) -> list[TaskSourceConfig]:
    """Parse and check task sources: keys, types, names."""
    raw: object = sources
    if isinstance(sources, str):
        try:
            raw = cast(object, json.loads(sources))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(
                f"expected task sources as JSON, got {sources!r} ({error}); write "
                'tasks=\'{"source_type": "demo_training"}\''
            ) from error
        if not isinstance(raw, dict | list):
            raise ConfigError(f"expected a JSON object or a list of them as task sources, got {sources!r}")
    items: list[object] = [raw] if isinstance(raw, Mapping) else list(cast(Sequence[object], raw))
    if not items:
        raise ConfigError('expected at least one task source, got none; try {"source_type": "demo_training"}')
    return [_parse_source(item) for item in items]


def find_task_backend(sources: TaskSources) -> TaskBackendName | None:
    """The devices that all these tasks bring; None if they run on the configured device."""
    used: list[TaskBackendName | None] = list({task_backend_of(config): None for config in parse_sources(sources)})
    if len(used) > 1:
        names = ", ".join(name or "the configured device" for name in used)
        raise ConfigError(f"expected tasks that run on one kind of device, got {names}; train on one of them at a time")
    return used[0]


def task_backend_of(config: TaskSourceConfig) -> TaskBackendName | None:
    """The devices that this source's tasks bring; None if they run on the configured device."""
    return cast(TaskBackendName, config.source_type) if config.source_type in get_args(TaskBackendName) else None


def _parse_source(item: object) -> TaskSourceConfig:
    given = read_mapping(item, "a task source", '{"source_type": "demo_training"}')
    given.require_keys(field.name for field in fields(TaskSourceConfig))
    source_type = cast(SourceType | None, given.choice("source_type", get_args(SourceType)))
    if source_type is None:
        raise ConfigError(
            f"expected source_type in a task source, got {dict(given.raw)!r}; add one of "
            f"{join_names(get_args(SourceType))}"
        )
    required = _REQUIRED.get(source_type)
    if required is not None and not given.raw.get(required):
        raise ConfigError(f"expected {required} beside source_type {source_type!r}, got none; add {required}")
    for key, owners in _BELONGS_TO.items():
        if given.raw.get(key) is not None and source_type not in owners:
            raise ConfigError(
                f"expected {key} only with source_type {' or '.join(map(repr, owners))}, got it with {source_type!r}; "
                f"set source_type to {owners[0]!r} or leave {key} out"
            )
    share = given.share("train_ratio")
    described = given.raw.get("custom_tasks")  # a description is not split at commas
    return TaskSourceConfig(
        source_type=source_type,
        task_ids=given.texts("task_ids"),
        file_path=given.text("file_path"),
        list_command=given.text("list_command"),
        custom_tasks=(described,) if isinstance(described, str) else given.items("custom_tasks"),
        pages=given.items("pages"),
        allowed_urls=given.texts("allowed_urls"),
        site_command=given.text("site_command"),
        reset=given.text("reset"),
        tasks_dir=given.text("tasks_dir"),
        train_ratio=TRAIN_RATIO if share is None else share,
        split_type=cast(Split | None, given.choice("split_type", get_args(Split))),
        # names of sets are known only once the folders are read
        category=given.text("category")
        if source_type == "task_adapter"
        else given.choice("category", get_args(Category)),
        difficulty=cast(Difficulty | None, given.choice("difficulty", get_args(Difficulty))),
        tags=given.texts("tags"),
        task_names=tuple(map(str, given.items("task_names"))),
        limit=given.integer("limit", at_least=1),
        seed=given.integer("seed", at_least=0),
        gym_base_url=_matching(given, "gym_base_url", r"https?://\S+", "an address such as 'http://localhost:5010'"),
        gym_id=given.text("gym_id"),
        eval_number_range=_matching(given, "eval_number_range", r"\d+-\d+", "two numbers such as '001-032'"),
    )


def _matching(given: Fields, key: str, pattern: str, expected: str) -> str | None:
    value = given.text(key)
    if value is not None and re.fullmatch(pattern, value) is None:
        raise given.error(key, expected)
    return value
