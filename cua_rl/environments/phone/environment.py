"""The simulated phone as an environment: demo tasks, lists of them, and tasks that the user describes."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from cua_rl.environments.contract import DeviceOrder, Environment, Loading, Source
from cua_rl.environments.device import DeviceAbilities, Screen
from cua_rl.environments.phone.custom import DescribedTask, make_undone, parse_custom_task
from cua_rl.environments.phone.demo.expert import DemoExperts
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING, TEMPLATES, held_out_templates
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH
from cua_rl.tasks.fields import Fields, given, parse_json, read_text, require_known
from cua_rl.tasks.task import Template
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

_SCREEN = Screen(kind="android", width_px=WIDTH, height_px=HEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSource(Source):
    """Sets of demo tasks; those whose goals a device cannot read are left out."""

    source_types = ("demo_training", "demo_eval", "demo_all")

    def load(self, loading: Loading) -> Sequence[Template]:
        templates = {
            "demo_training": DEMO_TRAINING,
            "demo_eval": DEMO_EVAL if loading.device.is_seeded else held_out_templates(),
            "demo_all": tuple(TEMPLATES.values()),
        }[self.source_type]
        fitting, unreadable = _fit(templates, loading.device)
        if unreadable:
            names = ", ".join(task.task_id for task in unreadable)
            device = loading.device.name
            logger.warning("left out %d tasks whose goals %s cannot read: %s", len(unreadable), device, names)
        return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSource(Source):
    """Single demo tasks."""

    source_types = ("ids",)
    required = "task_ids"

    task_ids: tuple[str, ...] = given(Fields.texts)

    def load(self, loading: Loading) -> Sequence[Template]:
        return _fit_all([_find(task_id, "task_ids") for task_id in self.task_ids], loading.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource(Source):
    """A file with an id per line (# begins a comment) or, where there is a judge, a description; or .json and .jsonl
    with ids or custom tasks.
    """

    source_types = ("file",)
    required = "file_path"

    file_path: str | None = given(Fields.text)

    def load(self, loading: Loading) -> Sequence[Template]:
        tasks = [
            # text without spaces is an id
            _find(task, where)
            if isinstance(task, str) and not re.search(r"\s", task.strip())
            else _describe(task, where, loading)
            for where, task in _read_entries(Path(self.file_path or "").expanduser())
        ]
        return _fit_all(tasks, loading.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSource(Source):
    """Tasks as `cua_rl.environments.phone.custom` reads them; where there is a judge, also descriptions."""

    source_types = ("custom",)
    required = "custom_tasks"

    custom_tasks: tuple[object, ...] = given(
        # a description is not split at commas
        lambda item, key: (text,) if isinstance(text := item.raw.get(key), str) else item.items(key)
    )

    def load(self, loading: Loading) -> Sequence[Template]:
        return [_describe(task, f"custom task {i}", loading) for i, task in enumerate(self.custom_tasks, start=1)]


def _fit(templates: Sequence[Template], device: DeviceAbilities) -> tuple[list[Template], list[Template]]:
    """The tasks as the device runs them, and those whose goals it cannot read."""
    if device.is_seeded:
        return list(templates), []
    fitting, unreadable = list[Template](), list[Template]()
    for task in templates:
        if not isinstance(task, TaskTemplate):
            fitting.append(task)
        elif task.is_readable(device):
            fitting.append(replace(task, undo=make_undone))
        else:
            unreadable.append(task)
    return fitting, unreadable


def _fit_all(templates: Sequence[Template], device: DeviceAbilities) -> list[Template]:
    """The tasks as the device runs them; raises `ConfigError` if it cannot read the goal of one."""
    fitting, unreadable = _fit(templates, device)
    if unreadable:
        names = ", ".join(task.task_id for task in unreadable)
        raise ConfigError(f"expected tasks whose goals {device.name} can read, got {names}; choose others")
    return fitting


def _read_entries(path: Path) -> Iterator[tuple[str, object]]:
    """Ids and descriptions, each with its place for messages: a JSON list, JSON lines, or lines of text."""
    text = read_text(path)
    if path.suffix == ".json":
        content = parse_json(text, str(path))
        if not isinstance(content, list):
            raise ConfigError(f"expected a list of tasks in {path}, got {type(content).__name__}; write [...]")
        yield from ((f"task {i} of {path}", entry) for i, entry in enumerate(cast("list[object]", content), start=1))
        return
    for i, line in enumerate(text.split("\n"), start=1):
        where = f"line {i} of {path}"
        # in text, # begins a comment after an id and at the start of a line; descriptions may hold it
        before_comment = line.partition("#")[0].strip()
        if path.suffix == ".jsonl" and line.strip():
            yield where, parse_json(line, where)
        elif path.suffix != ".jsonl" and before_comment:
            yield where, line.strip() if " " in before_comment else before_comment


def _describe(task: object, where: str, loading: Loading) -> DescribedTask:
    custom = parse_custom_task(task, where, loading.device, has_judge=loading.has_judge)
    if custom.task_id in TEMPLATES:
        raise ConfigError(f"expected a task_id of its own in {where}, got {custom.task_id!r}, a demo task; rename it")
    return custom


def _find(task_id: str, where: str) -> TaskTemplate:
    require_known(f"task id in {where}", task_id, TEMPLATES)
    return TEMPLATES[task_id]


def _make_backend(order: DeviceOrder) -> SimulatedPhones:
    scale = order.settings.browser_scale
    if scale is not None:
        raise ConfigError(f"browser_scale: expected it only with tasks on web pages, got {scale!r}; leave it out")
    return SimulatedPhones(scale=order.settings.screen_scale)


SIMULATOR = Environment(
    name="simulator",
    sources=(DemoSource, IdSource, FileSource, CustomSource),  # for real phones too
    is_configured=True,
    has_tiny_model=True,
    make_backend=_make_backend,
    smallest_screen=lambda order: _SCREEN.scaled(order.settings.screen_scale),
    experts=DemoExperts(),
)
