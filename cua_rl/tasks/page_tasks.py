"""Tasks on web pages of the user's own: an address, an instruction, and a check that the page must pass.

    {"url": "http://127.0.0.1:8000/", "instruction": "Search for tea.",
     "check": {"query": "value:#q", "expected": "tea"}}

Queries are those of `cua_rl.devices.browser.page`. Every rollout begins with a fresh browser context at the address;
what a server keeps between rollouts is the server's affair.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from cua_rl.devices.browser.backend import BrowserPages
from cua_rl.devices.browser.settings import PageSettings
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.devices.pool import DeviceRequest
from cua_rl.errors import ConfigError
from cua_rl.tasks.custom import HEADER_KEYS, DescribedTask, describe, parse_goal
from cua_rl.tasks.fields import read_mapping
from cua_rl.tasks.source_config import TaskSourceConfig

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


def parse_page_tasks(config: TaskSourceConfig) -> list[DescribedTask]:
    """The tasks of a "page" source; raises `ConfigError` for an invalid entry."""
    tasks: list[DescribedTask] = []
    for number, value in enumerate(config.pages, start=1):
        what = f"page task {number}"
        given = read_mapping(value, what, _EXAMPLE)
        given.require_keys((*HEADER_KEYS, "url"))
        url, instruction = given.text("url"), given.text("instruction")
        if not url or urlsplit(url).scheme not in ("http", "https", "file"):
            raise ConfigError(f"expected url in {what} as http://, https:// or file://, got {url!r}; write {_EXAMPLE}")
        if not instruction or given.raw.get("check") is None:
            raise ConfigError(f"expected instruction and check in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
        goal = parse_goal(given.raw["check"], f"the check of {what}", PAGE_BROWSER)
        tasks.append(describe(given, f"page/{number}", instruction, goal=goal, url=url))
    return tasks


def allowed_urls(configs: Sequence[TaskSourceConfig]) -> tuple[str, ...]:
    """Where pages may go: what the sources say, or else the tasks' own hosts (for files, their folders)."""
    said = [url for config in configs for url in config.allowed_urls]
    if said:
        return tuple(dict.fromkeys(said))
    urls = [task.url or "" for config in configs for task in parse_page_tasks(config)]
    parts = [urlsplit(url) for url in urls]
    return tuple(
        dict.fromkeys(
            f"{url.rpartition('/')[0]}/" if part.scheme == "file" else f"{part.scheme}://{part.netloc}/"
            for url, part in zip(urls, parts, strict=True)
        )
    )


class UserPages(BrowserPages):
    """The `DeviceBackend` of pages of the user's own: a fresh context for every rollout."""

    abilities: DeviceAbilities = PAGE_BROWSER

    def __init__(self, configs: Sequence[TaskSourceConfig], *, scale: float | None = None) -> None:
        urls = allowed_urls(configs)
        super().__init__(PageSettings(allowed_urls=urls, scale=1.0 if scale is None else scale))

    async def make(self, request: DeviceRequest) -> Device:
        """A blank page; `task.prepare` opens the address."""
        return await self.lend(request.task_id)
