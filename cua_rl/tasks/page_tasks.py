"""Tasks on web pages of the user's own: an address, an instruction, and a check that the page must pass.

    {"url": "http://127.0.0.1:8000/", "instruction": "Search for tea.",
     "check": {"query": "value:#q", "expected": "tea"}}

Queries are those of `cua_rl.devices.browser.page`. Every rollout begins with a fresh browser context at the address;
what a server keeps between rollouts is the server's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, cast, get_args
from urllib.parse import urlsplit

from cua_rl.devices.browser.backend import BrowserPages
from cua_rl.devices.browser.page import BrowserPage
from cua_rl.devices.browser.settings import PageSettings
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.devices.pool import DeviceRequest
from cua_rl.errors import ConfigError, TaskError
from cua_rl.tasks.custom import DEFAULT_MAX_TURNS, parse_goal
from cua_rl.tasks.demo.template import Goal
from cua_rl.tasks.fields import read_mapping
from cua_rl.tasks.source_config import TaskSourceConfig
from cua_rl.tasks.task import Category, Difficulty, Task
from cua_rl.types import Validation

PAGE_BROWSER = DeviceAbilities(
    name="a browser with pages of the user's own",
    has_shell=False,
    is_seeded=False,
    site="page",
    queries=frozenset({"url", "title", "text", "value", "checked", "count"}),
)
_EXAMPLE = (
    '{"url": "http://127.0.0.1:8000/", "instruction": "Search for tea.", "check": {"query": "value:#q", "expected": '
    '"tea"}}'
)
_KEYS = ("task_id", "url", "instruction", "max_turns", "check", "category", "difficulty", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTask:
    """A described task; it is the same for every seed."""

    task_id: str
    url: str
    instruction: str
    goal: Goal
    category: Category
    difficulty: Difficulty
    max_turns: int
    tags: tuple[str, ...]

    def make_task(self, seed: int) -> Task:
        """The task, beginning at its address."""
        return Task(
            task_id=self.task_id,
            seed=seed,
            instruction=self.instruction,
            category=self.category,
            difficulty=self.difficulty,
            max_turns=self.max_turns,
            tags=self.tags,
            prepare=partial(_open, self.url),
            validate=partial(_validate, self.goal),
        )


def parse_page_tasks(config: TaskSourceConfig) -> list[PageTask]:
    """The tasks of a "page" source; raises `ConfigError` for what cannot be meant."""
    return [_parse(value, f"page task {number}") for number, value in enumerate(config.pages, start=1)]


def allowed_urls(configs: Sequence[TaskSourceConfig]) -> tuple[str, ...]:
    """Where pages may go: what the sources say, or else the tasks' own hosts (for files, their folders)."""
    said = [url for config in configs for url in config.allowed_urls]
    if said:
        return tuple(dict.fromkeys(said))
    return tuple(dict.fromkeys(_surroundings(task.url) for config in configs for task in parse_page_tasks(config)))


class UserPages:
    """The `DeviceBackend` of pages of the user's own: a fresh context for every rollout."""

    abilities: DeviceAbilities = PAGE_BROWSER

    def __init__(self, configs: Sequence[TaskSourceConfig], *, scale: float | None = None) -> None:
        urls = allowed_urls(configs)
        self.pages = BrowserPages(PageSettings(allowed_urls=urls, scale=1.0 if scale is None else scale))

    async def make(self, request: DeviceRequest) -> Device:
        """A blank page; `task.prepare` opens the address."""
        return await self.pages.lend(request.task_id)

    async def __aenter__(self) -> Self:
        await self.pages.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pages.__aexit__(kind, error, trace)


def _parse(value: object, what: str) -> PageTask:
    given = read_mapping(value, what, _EXAMPLE)
    given.require_keys(_KEYS)
    url, instruction = given.text("url"), given.text("instruction")
    if not url or urlsplit(url).scheme not in ("http", "https", "file"):
        raise ConfigError(f"expected url in {what} as http://, https:// or file://, got {url!r}; write {_EXAMPLE}")
    if not instruction or given.raw.get("check") is None:
        raise ConfigError(f"expected instruction and check in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
    return PageTask(
        task_id=given.text("task_id") or f"page/{what.rpartition(' ')[2]}",
        url=url,
        instruction=instruction,
        goal=parse_goal(given.raw["check"], f"the check of {what}", PAGE_BROWSER),
        category=cast(Category, given.choice("category", get_args(Category)) or "app"),
        difficulty=cast(Difficulty, given.choice("difficulty", get_args(Difficulty)) or "medium"),
        max_turns=given.integer("max_turns", at_least=1) or DEFAULT_MAX_TURNS,
        tags=given.texts("tags"),
    )


def _surroundings(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return f"{url.rpartition('/')[0]}/"
    return f"{parts.scheme}://{parts.netloc}/"


async def _open(url: str, device: Device) -> None:
    if not isinstance(device, BrowserPage):
        raise TaskError(f"expected a page of a browser, got {device.device_id!r}; leave choosing devices to tasks")
    await device.open_page(url)


async def _validate(goal: Goal, device: Device, answer: str | None) -> Validation:
    actual = await device.query(goal.query)
    is_told = goal.how == "told"
    return Validation(
        query=goal.query,
        expected=actual if is_told else goal.expected,
        actual=(answer or "") if is_told else actual,
        success=goal.is_met(actual, answer),
    )
