"""From what the user asked for to tasks: which templates, and which instance of which template at which step."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Literal, cast, get_args

from cua_rl.errors import ConfigError
from cua_rl.tasks.demo.template import TaskTemplate
from cua_rl.tasks.demo.templates import DEMO_EVAL, DEMO_TRAINING, TEMPLATES
from cua_rl.tasks.task import Category, Difficulty, Task

SourceType = Literal["demo_training", "demo_eval", "demo_all", "ids", "file"]
Split = Literal["train", "eval"]
TaskSources = str | Mapping[str, object] | Sequence[Mapping[str, object]]
"""One source or several, as dicts or as their JSON text."""

SEED_RANGES: dict[Split, range] = {"train": range(1_000_000), "eval": range(1_000_000, 2_000_000)}
"""Instance seeds of each split. They are disjoint, so no phone that was trained on is ever evaluated on."""

_NO_VALIDATOR = "a description alone cannot be validated, so there is nothing to learn from; use task ids"
_INSTEAD = {"custom": _NO_VALIDATOR, "custom_tasks": _NO_VALIDATOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSourceConfig:
    """Where task templates come from, and which of them are kept."""

    source_type: SourceType
    task_ids: tuple[str, ...] = ()
    """For "ids"."""
    file_path: str | None = None
    """For "file": one task id per line; what follows a # is a comment."""
    category: Category | None = None
    difficulty: Difficulty | None = None
    tags: tuple[str, ...] = ()
    """Templates must have all of these."""
    limit: int | None = None
    """Keep a random choice of so many templates, in their order."""
    seed: int | None = None
    """Seed of that choice; None takes the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Templates, and the rule that says which instance runs when: a pure function of seed, split and position."""

    templates: tuple[TaskTemplate, ...]
    seed: int
    split: Split

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(template.task_id for template in self.templates)

    def batch(self, step: int, num_tasks: int) -> list[Task]:
        """The tasks of a step: every template comes round equally often, on a new phone each time."""
        first = step * num_tasks
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


def load_tasks(sources: TaskSources, *, seed: int, split: Split) -> TaskSet:
    """The templates of all sources, each once, in order; raises `ConfigError` for whatever cannot be meant."""
    found = [template for config in parse_sources(sources) for template in _select(config, seed)]
    return TaskSet(templates=tuple({template.task_id: template for template in found}.values()), seed=seed, split=split)


def require_disjoint(train: Iterable[Task], held_out: Iterable[Task]) -> None:
    """Raise `ConfigError` if a phone (a seed) is both trained and evaluated on."""
    shared = {task.seed for task in train} & {task.seed for task in held_out}
    if shared:
        raise ConfigError(
            f"expected training and evaluation on different seeds, got {sorted(shared)[:5]!r} in both; "
            "load one with split='train' and the other with split='eval'"
        )


def parse_sources(sources: TaskSources) -> list[TaskSourceConfig]:
    """Check the shape of what the user wrote: keys, types, names."""
    raw = _parse_json(sources) if isinstance(sources, str) else sources
    items: list[object] = [raw] if isinstance(raw, Mapping) else list(cast(Sequence[object], raw))
    if not items:
        raise ConfigError('expected at least one task source, got none; try {"source_type": "demo_training"}')
    return [_parse_source(item) for item in items]


def _parse_json(text: str) -> object:
    try:
        parsed: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'expected task sources as JSON, got {text!r} ({error}); write tasks=\'{{"source_type": "demo_training"}}\''
        ) from error
    if not isinstance(parsed, dict | list):
        raise ConfigError(f"expected a JSON object or a list of them as task sources, got {text!r}")
    return cast(object, parsed)


def _parse_source(item: object) -> TaskSourceConfig:
    if not isinstance(item, Mapping):
        raise ConfigError(f'expected a task source such as {{"source_type": "demo_training"}}, got {item!r}')
    raw = cast(Mapping[str, object], item)
    known = [field.name for field in fields(TaskSourceConfig)]
    for key in raw:
        _require_known("key of a task source", key, known)
    if "source_type" not in raw:
        raise ConfigError(
            f"expected source_type in a task source, got {dict(raw)!r}; add one of {_join(get_args(SourceType))}"
        )
    source_type = _choice("source_type", raw["source_type"], get_args(SourceType))
    config = TaskSourceConfig(
        source_type=cast(SourceType, source_type),
        task_ids=_texts(raw, "task_ids"),
        file_path=_text(raw, "file_path"),
        category=cast(Category | None, _optional_choice(raw, "category", get_args(Category))),
        difficulty=cast(Difficulty | None, _optional_choice(raw, "difficulty", get_args(Difficulty))),
        tags=_texts(raw, "tags"),
        limit=_integer(raw, "limit", at_least=1),
        seed=_integer(raw, "seed", at_least=0),
    )
    _require_consistent(config)
    return config


def _require_consistent(config: TaskSourceConfig) -> None:
    for key, given, source_type in (
        ("task_ids", bool(config.task_ids), "ids"),
        ("file_path", config.file_path is not None, "file"),
    ):
        if config.source_type == source_type and not given:
            raise ConfigError(f"expected {key} beside source_type {source_type!r}, got none; add {key}")
        if config.source_type != source_type and given:
            raise ConfigError(
                f"expected {key} only with source_type {source_type!r}, got it with {config.source_type!r}; "
                f"set source_type to {source_type!r} or leave {key} out"
            )


def _select(config: TaskSourceConfig, run_seed: int) -> list[TaskTemplate]:
    found = [template for template in _candidates(config) if _passes(template, config)]
    if not found:
        raise ConfigError(f"expected at least one task, got none from {config!r}; loosen category, difficulty or tags")
    if config.limit is not None and config.limit < len(found):
        random = Random(f"limit-{run_seed if config.seed is None else config.seed}")
        kept = sorted(random.sample(range(len(found)), config.limit))
        return [found[i] for i in kept]
    return found


def _candidates(config: TaskSourceConfig) -> list[TaskTemplate]:
    match config.source_type:
        case "demo_training":
            return list(DEMO_TRAINING)
        case "demo_eval":
            return list(DEMO_EVAL)
        case "demo_all":
            return list(TEMPLATES.values())
        case "ids":
            return [_find(task_id, "task_ids") for task_id in config.task_ids]
        case "file":
            return _read_file(Path(config.file_path or ""))


def _read_file(path: Path) -> list[TaskTemplate]:
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"expected a text file with task ids at {str(path)!r}, got {error}; check file_path"
        ) from error
    ids = [(i, line.partition("#")[0].strip()) for i, line in enumerate(lines, start=1)]
    return [_find(task_id, f"line {i} of {path}") for i, task_id in ids if task_id]


def _find(task_id: str, where: str) -> TaskTemplate:
    _require_known(f"task id in {where}", task_id, TEMPLATES)
    return TEMPLATES[task_id]


def _passes(template: TaskTemplate, config: TaskSourceConfig) -> bool:
    return (
        config.category in (None, template.category)
        and config.difficulty in (None, template.difficulty)
        and set(config.tags) <= set(template.tags)
    )


def _require_known(what: str, got: str, known: Iterable[str]) -> None:
    known = list(known)
    if got in known:
        return
    near = get_close_matches(got, known, n=3)
    if got in _INSTEAD:
        do = _INSTEAD[got]
    elif near:
        do = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        do = f"choose one of {_join(known[:20])}"
    raise ConfigError(f"expected a known {what}, got {got!r}; {do}")


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _choice(key: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected {key} as one of {_join(choices)}, got {value!r}")
    _require_known(key, value, choices)
    return value


def _optional_choice(raw: Mapping[str, object], key: str, choices: Sequence[str]) -> str | None:
    value = raw.get(key)
    return None if value is None else _choice(key, value, choices)


def _text(raw: Mapping[str, object], key: str) -> str | None:
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"expected {key} as text, got {value!r}")


def _texts(raw: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = raw.get(key)
    items: Sequence[object] = (
        () if value is None else cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,)
    )
    texts = tuple(item for item in items if isinstance(item, str))
    if len(texts) < len(items):
        raise ConfigError(f"expected {key} as a list of texts, got {value!r}")
    return texts


def _integer(raw: Mapping[str, object], key: str, *, at_least: int) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"expected {key} as a whole number of at least {at_least}, got {value!r}")
    return value
