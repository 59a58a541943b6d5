"""Tasks on web sites: a start address and an instruction, from lists in the formats in which they are published."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.page_site import PageSite
from cua_rl.environments.browser.page_tasks import read_task_file
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.environments.browser.web.politeness import MAX_WAIT_S, Politeness, site_of
from cua_rl.environments.browser.web.recording import Replay, begin_recording, begins_at, read_recording, recording_name
from cua_rl.environments.browser.web.visit import NOWHERE, Visit, WebPlace, begin_visit
from cua_rl.environments.contract import Loading, Source, SplitSource
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool import DeviceRequest
from cua_rl.environments.query_values import PAGE_QUERIES
from cua_rl.tasks.fields import Fields, given, read_mapping
from cua_rl.tasks.task import Task, Template, read_difficulty
from cua_rl.types.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

logger = getLogger(__name__)

WEB_BROWSER = DeviceAbilities(
    name="a browser on web sites",
    has_shell=False,
    is_seeded=False,
    is_repeatable=False,
    environment="web",
    queries=PAGE_QUERIES,
)
_MAX_TURNS = 30
_KEYS = ("task_id", "instruction", "url", "difficulty")
_FORMATS: Mapping[str, Sequence[str]] = {
    "Online-Mind2Web": ("task_id", "confirmed_task", "website", "level"),
    "WebVoyager": ("id", "ques", "web"),
    "this package": _KEYS,
}
"""Where lists keep what a task needs, in the order of `_KEYS`; published ones have more keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebTask(Template):
    """A task on a web site, the same for every seed; a judge decides whether it was done."""

    instruction: str
    place: WebPlace

    @property
    def is_judged(self) -> bool:
        return True

    def make_task(self, seed: int) -> Task:
        """The task; the seed only tells recorded rollouts apart."""
        return self.build_task(seed, self.instruction, validate=None, prepare=begin_visit, world=self.place)


def _folder(name: str | None) -> Path | None:
    return None if name is None else Path(name).expanduser().absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSource(SplitSource):
    """Lists of tasks on web sites, in the formats of Online-Mind2Web and WebVoyager, or with url and instruction."""

    source_types = ("web",)
    required = "file_path"

    file_path: str = given(lambda item, key: item.text(key) or "")
    """A .json or .jsonl file."""
    allowed_hosts: tuple[str, ...] = given(Fields.texts)
    """Hosts, with their subdomains, that pages may request besides the site of the start address."""
    max_per_host: int = given(lambda item, key: item.integer(key, at_least=1) or 4)
    """Pages at a site at a time, in each process of the run."""
    page_interval_ms: int = given(lambda item, key: 1000 if (ms := item.integer(key, at_least=0)) is None else ms)
    """Time between two pages that a site is asked for; what its robots.txt calls Crawl-delay if that is longer."""
    robots: str = given(lambda item, key: item.choice(key, ("obey", "ignore")) or "obey")
    record: str | None = given(Fields.text)
    """A folder for what pages are answered."""
    replay: str | None = given(Fields.text)
    """The folder of a recording, which answers instead of the sites."""

    def load(self, loading: Loading) -> list[WebTask]:
        if not loading.has_judge:
            raise ConfigError(
                "expected a judge for source_type 'web', got none: only a judge can decide what was done on sites that "
                "are not ours; set judge.base_url and judge.model (docs/judge.md)"
            )
        return self.take_side(self.read(), loading.seed)

    def read(self) -> list[WebTask]:
        """All tasks that can run, of both sides of the split; raises `ConfigError`."""
        if self.record is not None and self.replay is not None:
            raise ConfigError(f"expected record or replay, got both: {self.record!r}, {self.replay!r}; leave one out")
        if (wait_s := self.max_per_host * self.page_interval_ms / 1000) > MAX_WAIT_S:
            raise ConfigError(
                f"expected max_per_host pages to wait {MAX_WAIT_S:g} s or less for each other, page_interval_ms times "
                f"max_per_host, got {wait_s:g} s; lower one of them"
            )
        path = Path(self.file_path).expanduser().absolute()
        entries = enumerate(read_task_file(path), start=1)
        tasks = [self._parse(value, f"task {number} of {path}", f"{path.stem}/{number}") for number, value in entries]
        replay = _folder(self.replay)
        if replay is None:
            return tasks
        recording = read_recording(replay)
        known = [task for task in tasks if begins_at(recording, task.place.url)]
        if not known:
            raise ConfigError(
                f"expected a recording of one of the {len(tasks)} start addresses of {path} in {str(replay)!r}, "
                "got none; record them, or correct replay"
            )
        if len(known) < len(tasks):
            logger.warning("%d tasks are left out, whose addresses %s lacks", len(tasks) - len(known), replay)
        return known

    def _parse(self, value: object, what: str, default_id: str) -> WebTask:
        raw = read_mapping(value, what, '{"url": "https://example.com/", "instruction": "Find tea."}').raw
        names = next((names for names in _FORMATS.values() if raw.keys() >= set(names[1:3])), None)
        if names is None:
            expected = "; ".join(f"{name}: {', '.join(names)}" for name, names in _FORMATS.items())
            raise ConfigError(
                f"expected the keys of a known list in {what} ({expected}), got {', '.join(raw)}; rename them"
            )
        item = Fields(raw={key: raw[name] for key, name in zip(_KEYS, names, strict=False) if name in raw}, what=what)
        url, instruction = item.text("url") or "", item.text("instruction")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not instruction:
            raise ConfigError(
                f"expected {names[2]} as an address with http:// or https://, and {names[1]} as text in {what}, got "
                f"{url!r} and {instruction!r}; correct them"
            )
        place = WebPlace(
            url=url if parts.path else parts._replace(path="/").geturl(),
            hosts=(site_of(url), *self.allowed_hosts),
            max_per_host=self.max_per_host,
            page_interval_s=self.page_interval_ms / 1000,
            obeys_robots=self.robots == "obey",
            record=_folder(self.record),
            replay=_folder(self.replay),
        )
        return WebTask(
            task_id=item.text("task_id") or default_id,
            instruction=instruction,
            place=place,
            category="navigation",
            difficulty=read_difficulty(item),
            max_turns=_MAX_TURNS,
            tags=(parts.hostname,),
            item=dict(raw),
        )


class WebPages(BrowserPages):
    """The `DeviceBackend` of web sites: every rollout has a context of its own, which may visit one site."""

    abilities: DeviceAbilities = WEB_BROWSER

    def __init__(self, sources: Sequence[Source], *, scale: float | None = None) -> None:
        places = [task.place for source in sources if isinstance(source, WebSource) for task in source.read()]
        super().__init__(
            PageSettings(
                allowed_urls=tuple(dict.fromkeys(url for place in places for url in place.allowed_urls)),
                scale=1.0 if scale is None else scale,
                answer_timeout_s=5.0,
                load_timeout_s=MAX_WAIT_S,
                close_timeout_s=30.0,  # what was recorded is written then
            )
        )
        self._folders = {place.record for place in places if place.record is not None}
        self._politeness = Politeness()

    async def make(self, request: DeviceRequest) -> Device:
        """A blank page, once its site has a place for it; `task.prepare` opens the address."""
        place, task_id, seed = request.world, request.task_id, request.seed
        if not isinstance(place, WebPlace):
            raise TaskError(f"expected a task on a web site, got {task_id!r}; run it on devices of its own")
        found = None if place.replay is None else await asyncio.to_thread(read_recording, place.replay)
        replay = None if found is None else Replay(found, task_id, seed)
        name = recording_name(task_id, seed, request.rollout_id)
        visit = Visit(place, self._politeness, name=name, replay=replay)
        await visit.enter()
        return await self.lend(task_id, site=visit)

    async def _open_sites(self) -> None:
        for folder in self._folders:
            await asyncio.to_thread(begin_recording, folder)

    def _settings_for(self, site: PageSite | None) -> PageSettings:
        return replace(self.settings, allowed_urls=site.place.allowed_urls if isinstance(site, Visit) else (NOWHERE,))

    async def _equip(self, context: "BrowserContext", page: BrowserPage, site: PageSite | None) -> None:
        if isinstance(site, Visit):
            await site.equip(context, page)
