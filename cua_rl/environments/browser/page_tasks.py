"""Tasks on web pages of the user's own: an address, an instruction, and a check.

    {"url": "http://127.0.0.1:8000/", "instruction": "Search for tea.",
     "check": {"query": "value:#q", "expected": "tea"}}

Checks: `cua_rl.environments.browser.page_checks`. Every rollout begins with a fresh browser context at the address.
With a `site_command`, every page has its own server, addresses are paths on it ("/" by default), and its state
begins anew with every rollout. Without one, the server decides what it keeps between rollouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.page import as_page
from cua_rl.environments.browser.page_checks import PageCheck, parse_check, require_program, run_check
from cua_rl.environments.browser.page_copy import PageState
from cua_rl.environments.browser.served_site import SiteServers
from cua_rl.environments.browser.settings import RESET_METHODS, PageSettings, SiteProgram
from cua_rl.environments.contract import Loading, Source, SplitSource
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool import DeviceRequest
from cua_rl.environments.query_values import PAGE_QUERIES
from cua_rl.tasks.fields import Fields, given, parse_json, read_mapping, read_text
from cua_rl.tasks.task import DEFAULT_MAX_TURNS, HEADER_KEYS, Task, Template, read_category, read_difficulty, read_item
from cua_rl.types.errors import ConfigError, DeviceError

PAGE_BROWSER = DeviceAbilities(
    name="a browser with pages of the user's own",
    has_shell=False,
    is_seeded=False,
    environment="page",
    queries=PAGE_QUERIES,
)
_NOWHERE = "http://127.0.0.1:0/"
_EXAMPLE = (
    '{"url": "http://127.0.0.1:8000/", "instruction": "Search for tea.", "check": {"query": "value:#q", "expected": '
    '"tea"}}'
)
_SUITE_KEYS = {"id": "task_id", "verify": "check"}
"""Names in published suites of sites, and our keys for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTask(Template):
    """A task on a page; it is the same for every seed."""

    instruction: str
    url: str
    """An address or, on a site that the run serves, a path."""
    check: PageCheck
    site: SiteProgram | None = None

    def make_task(self, seed: int) -> Task:
        """The task; the seed has no effect."""
        address = None if self.site else _origin(self.url).removesuffix("/")
        return self.build_task(
            seed,
            self.instruction,
            validate=partial(run_check, self.check, address),
            prepare=partial(_open_page, self.url),
            world=self.site,
        )


async def _open_page(url: str, device: Device) -> None:
    page = as_page(device)
    await page.open_page(url if page.site is None else f"{page.site.url.removesuffix('/')}{url}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource(SplitSource):
    """Pages in the source itself or in files."""

    source_types = ("page",)

    pages: tuple[object, ...] = given(Fields.items)
    """Tasks as dictionaries."""
    file_path: str | None = given(Fields.text)
    """Instead of `pages`: a .json or .jsonl file, or a folder with tasks.json or other such files."""
    allowed_urls: tuple[str, ...] = given(Fields.texts)
    """Prefixes of addresses that pages may request; () allows the tasks' own hosts."""
    site_command: str | None = given(Fields.text)
    """Command that starts the server of each page, in the tasks' folder; `{port}` is its port."""
    reset: str | None = given(Fields.text)
    """With `site_command`: a request such as "POST /api/reset", or a command, before a server is used again; None
    starts a new one for every rollout."""
    snapshot: str | None = given(Fields.text)
    """With `site_command`: a request that answers with the server's state, or a command that writes it to the file
    CUA_STATE_PATH."""
    restore: str | None = given(Fields.text)
    """With `snapshot`: a request with the state of another server as its body, or a command that reads it."""

    def load(self, loading: Loading) -> list[PageTask]:
        return self.take_side(self.read(), loading.seed)

    def read(self) -> list[PageTask]:
        """All tasks, of both sides of the split; raises `ConfigError`."""
        site = parse_site(self)
        return [
            _parse_task(value, what, folder=folder, default_id=default_id, site=site)
            for what, value, folder, default_id in _read_entries(self)
        ]


def parse_site(config: PageSource) -> SiteProgram | None:
    """The site that a source serves; raises `ConfigError` if it cannot work."""
    orders = {"reset": config.reset, "snapshot": config.snapshot, "restore": config.restore}
    if config.site_command is None:
        for name, order in orders.items():
            if order is not None:
                raise ConfigError(
                    f"expected {name} beside site_command, got {order!r} without one: a site that all rollouts share "
                    f"must not be changed while others use it; set site_command, or leave {name} out"
                )
        return None
    if (config.snapshot is None) != (config.restore is None):
        raise ConfigError(
            f"expected snapshot and restore, or neither, got {config.snapshot!r} and {config.restore!r}; set both"
        )
    if "{port}" not in config.site_command:
        raise ConfigError(
            f"expected {{port}} in site_command, where the server is told its port, got {config.site_command!r}; write "
            'it as in "python server.py --port {port}"'
        )
    require_program(config.site_command, "site_command")
    for name, order in orders.items():
        method, _, path = (order or "").partition(" ")
        if order is not None and method not in RESET_METHODS:
            require_program(order, name)
        elif order is not None and not path.strip().startswith("/"):
            raise ConfigError(f'expected {name} as a request such as "POST /api/reset", got {order!r}; correct it')
    return SiteProgram(command=config.site_command, folder=_folder_of(config), **orders)


def _folder_of(config: PageSource) -> Path:
    """What paths and commands of a source are relative to."""
    if config.file_path is None:
        return Path.cwd()
    path = Path(config.file_path).expanduser().absolute()
    return path if path.is_dir() else path.parent


def _read_entries(config: PageSource) -> Iterator[tuple[str, object, Path, str]]:
    """(place for messages, task, folder, default id) of each task: of `pages`, a file, or the files of a folder."""
    if bool(config.pages) == (config.file_path is not None):
        raise ConfigError(
            "expected either pages or file_path beside source_type 'page', got "
            f"{'both' if config.pages else 'neither'}; set one of them"
        )
    folder = _folder_of(config)
    if config.file_path is None:
        for number, value in enumerate(config.pages, start=1):
            yield f"page task {number}", value, folder, f"page/{number}"
        return
    path = Path(config.file_path).expanduser().absolute()
    own = path / "tasks.json"
    files = [path] if not path.is_dir() else [own] if own.is_file() else sorted(path.glob("*.json*"))
    entries = [(file, number, value) for file in files for number, value in enumerate(read_task_file(file), start=1)]
    if not entries:
        raise ConfigError(
            f"expected tasks.json or other JSON files with tasks in {str(path)!r}, got none; check file_path"
        )
    for file, number, value in entries:
        yield f"task {number} of {file}", value, folder, f"{folder.name}/{file.stem}_{number}"


def read_task_file(path: Path) -> list[object]:
    """The tasks of a file: a list, an object with a list under "tasks", or one task; .jsonl has one per line."""
    text = read_text(path, "a JSON file")
    if path.suffix == ".jsonl":
        return [parse_json(line, str(path)) for line in text.split("\n") if line.strip()]
    content = parse_json(text, str(path))
    if isinstance(content, dict):
        content = cast("dict[str, object]", content).get("tasks") or [cast("object", content)]
    if not isinstance(content, list):
        raise ConfigError(f"expected a list of tasks in {str(path)!r}, got {type(content).__name__}; write [...]")
    return cast("list[object]", content)


def _parse_task(value: object, what: str, *, folder: Path, default_id: str, site: SiteProgram | None) -> PageTask:
    raw = read_mapping(value, what, _EXAMPLE).raw
    given = Fields(raw={_SUITE_KEYS.get(key, key): entry for key, entry in raw.items()}, what=what)
    given.require_keys((*HEADER_KEYS, "url"))
    url, instruction = given.text("url") or ("/" if site else ""), given.text("instruction")
    if site is None and urlsplit(url).scheme not in ("http", "https", "file"):
        raise ConfigError(f"expected url in {what} as http://, https:// or file://, got {url!r}; write {_EXAMPLE}")
    if site is not None and not url.startswith("/"):
        raise ConfigError(f'expected url in {what} as a path on the site, such as "/", got {url!r}; change it')
    if not instruction or given.raw.get("check") is None:
        raise ConfigError(f"expected instruction and check in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
    own_id = given.text("task_id")
    if own_id and not default_id.startswith("page/"):
        own_id = f"{folder.name}/{own_id}"  # several sites of a suite use the same ids
    return PageTask(
        task_id=own_id or default_id,
        instruction=instruction,
        url=url,
        check=parse_check(given.raw["check"], f"the check of {what}", folder, PAGE_BROWSER),
        site=site,
        category=read_category(given),
        difficulty=read_difficulty(given),
        max_turns=given.integer("max_turns", at_least=1) or DEFAULT_MAX_TURNS,
        tags=given.texts("tags"),
        item=read_item(given),
    )


def allowed_urls(configs: Sequence[PageSource]) -> tuple[str, ...]:
    """Where pages may go beside their own site: as the sources say, or the tasks' own hosts (folders, for files)."""
    said = [url for config in configs for url in config.allowed_urls]
    if said:
        return tuple(dict.fromkeys(said))
    tasks = [task for config in configs for task in config.read()]
    return tuple(dict.fromkeys(_origin(task.url) for task in tasks if task.site is None))


def _origin(url: str) -> str:
    part = urlsplit(url)
    return f"{url.rpartition('/')[0]}/" if part.scheme == "file" else f"{part.scheme}://{part.netloc}/"


class UserPages(BrowserPages):
    """The `DeviceBackend` of pages of the user's own: contexts are new for every rollout, servers are reset."""

    abilities: DeviceAbilities = PAGE_BROWSER

    def __init__(self, sources: Sequence[Source], *, scale: float | None = None) -> None:
        configs = [source for source in sources if isinstance(source, PageSource)]
        urls = allowed_urls(configs) or (_NOWHERE,)
        super().__init__(PageSettings(allowed_urls=urls, scale=1.0 if scale is None else scale))
        self._programs = dict.fromkeys(filter(None, map(parse_site, configs)))
        self._other_urls = {url for config in configs if config.site_command for url in config.allowed_urls}
        self._servers = SiteServers()

    async def make(self, request: DeviceRequest) -> Device:
        """A blank page, with a server if the task needs one; `task.prepare` opens the address."""
        if not isinstance(request.world, SiteProgram):
            return await self.lend(request.task_id)
        page = await self.lend(request.task_id, site=await self._servers.take(request.world))
        if request.snapshot is not None:
            assert isinstance(request.snapshot.state, PageState), "snapshots of a run are of its own devices"
            try:
                await page.restore(request.snapshot.state)
            except BaseException:
                await page.close()
                raise
        return page

    async def _open_sites(self) -> None:
        """Try each site once: a command that does not work ends the run, not every rollout."""
        try:
            if self._programs:
                self._servers = await self._open_servers(self._other_urls)
            for program in self._programs:
                await self._servers.start(program)
                await self._servers.close()
        except DeviceError as error:
            raise ConfigError(f"{error}; correct site_command") from None
