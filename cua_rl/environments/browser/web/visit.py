"""A rollout on a web site: its browser context obeys the limits and records, or gets its responses from a recording."""

import asyncio
import json
import re
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cua_rl.environments.browser.page import BrowserPage, as_page
from cua_rl.environments.browser.web.blocking import LOOK, SELECTORS, why_blocked
from cua_rl.environments.browser.web.politeness import MAX_WAIT_S, Politeness
from cua_rl.environments.browser.web.recording import FROZEN, Replay, asked_of, read_clock
from cua_rl.environments.device import Device
from cua_rl.types.errors import BlockedError, DeviceError, TaskError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Request, Response, Route, WebSocketRoute

NOWHERE = "http://127.0.0.1:0/"
_ANYTHING = re.compile("")
_NO_CONTENT = (204, 205)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPlace:
    """Where a rollout begins, and what it may do there."""

    url: str
    hosts: tuple[str, ...]
    """Hosts, with their subdomains and at most a port each, that the page may request."""
    max_per_host: int = 4
    page_interval_s: float = 1.0
    obeys_robots: bool = True
    record: Path | None = None
    replay: Path | None = None

    @property
    def allowed_urls(self) -> tuple[str, ...]:
        """Prefixes of the addresses that its page may request; none where it is replayed."""
        names = [] if self.replay else [name for host in self.hosts for name in (host, f"*.{host}")]
        return tuple(f"{scheme}://{name}/" for name in names for scheme in ("http", "https")) or (NOWHERE,)


class Visit:
    """The `PageSite` of a page at a web site, which is left when the page is given back."""

    def __init__(self, place: WebPlace, politeness: Politeness, *, name: str, replay: Replay | None) -> None:
        self.place = place
        self.url = place.url
        self._politeness = politeness
        self._replay = replay
        self._part = None if place.record is None else place.record / f"{name}.part"
        self._is_blocked = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._stack = AsyncExitStack()

    async def enter(self) -> None:
        """Wait for one of the site's places."""
        if self._replay is None:
            if self.place.obeys_robots:
                with suppress(DeviceError):  # which is raised when the page begins
                    await self._politeness.allows(self.url)  # learns how long pages of the site wait for each other
            places = self._politeness.places(self.url, self.place.max_per_host)
            await self._stack.enter_async_context(places)

    async def answer(self, name: str) -> str:
        """The page answers all queries; raises `TaskError`."""
        raise TaskError(f"expected a query that a page answers, such as 'title', got {name!r}; correct the task")

    async def release(self, *, is_clean: bool = True) -> None:
        """Leave the site; what was recorded counts from now on, unless the site turned the page away."""
        await self._stack.aclose()
        if self._part is not None and self._part.exists():
            if self._is_blocked:
                self._part.unlink()
            else:
                self._part.rename(self._part.with_suffix(""))

    async def equip(self, context: "BrowserContext", page: BrowserPage) -> None:
        """Let the context answer from the recording or, at the site itself, record and be polite."""
        folder = self.place.record or self.place.replay
        if folder is not None:
            await context.add_init_script(FROZEN % await asyncio.to_thread(read_clock, folder))
            await context.route_web_socket(_ANYTHING, _close)
        if self._part is not None:
            await context.route_from_har(self._part, update=True, update_content="attach", update_mode="minimal")
        if self._replay is not None:
            await context.route(_ANYTHING, partial(_serve, self._replay))
        else:
            page.watch = partial(self._require_welcome, page, is_first=False)
            context.on("response", self._note_response)
            await context.route(_ANYTHING, partial(self._admit, page))

    async def begin(self, page: BrowserPage) -> None:
        """Open the address; raises `BlockedError` if robots.txt forbids that, or the site turns the page away."""
        if self._replay is not None:
            await page.open_page(self.url)
            return
        if self.place.obeys_robots and (delay_s := self._politeness.delay_s(self.url)) > MAX_WAIT_S:
            raise BlockedError(
                f"expected a site that gives a page every {MAX_WAIT_S:g} s or more often, got a Crawl-delay of "
                f"{delay_s:g} s for {self.url!r}; leave the task out"
            )
        if self.place.obeys_robots and not await self._politeness.allows(self.url):
            raise BlockedError(
                f"expected a page that programs may load, got {self.url!r}, which its robots.txt forbids; leave the "
                "task out or, if the site's owner agrees, set robots to 'ignore'"
            )
        await page.open_page(self.url)
        await self._require_welcome(page, is_first=True)

    async def _require_welcome(self, page: BrowserPage, *, is_first: bool) -> None:
        seen: object = {"title": "", "captcha": "", "widget": ""}
        with suppress(TaskError):  # the page's own scripts broke what it needs
            seen = await page.evaluate(LOOK, SELECTORS)
        reason = why_blocked(self._status, self._headers, cast("dict[str, str]", seen), is_first=is_first)
        if reason is not None:
            self._is_blocked = True
            raise BlockedError(f"expected a page at {page.url[:200]!r}, got {reason}: the site turns the browser away")

    def _note_response(self, response: "Response") -> None:
        if _is_document(response.request):
            self._status, self._headers = response.status, response.headers

    async def _admit(self, page: BrowserPage, route: "Route") -> None:
        """Let a document wait for its turn, unless the page may not go there or robots.txt forbids it."""
        request = route.request
        if _is_document(request) and page.settings.blocked_urls.match(request.url) is None:
            if self.place.obeys_robots:
                is_allowed = False
                with suppress(DeviceError):
                    is_allowed = await self._politeness.allows(request.url)
                if not is_allowed:
                    await page.block(route)
                    return
            await self._politeness.pace(request.url, self.place.page_interval_s)
        await route.fallback()


async def begin_visit(device: Device) -> None:
    """Set a web task up: open the address at which its rollouts begin."""
    page = as_page(device)
    if not isinstance(page.site, Visit):
        raise TaskError(f"expected a page at a web site, got {device.device_id!r}; run web tasks on their own devices")
    await page.site.begin(page)


def _is_document(request: "Request") -> bool:
    return request.is_navigation_request() and request.frame.parent_frame is None


async def _close(socket: "WebSocketRoute") -> None:
    await socket.close()


async def _serve(replay: Replay, route: "Route") -> None:
    """Answer from the recording; what it does not hold is blocked."""
    request = route.request
    is_navigation = request.is_navigation_request()
    answer = replay.answer(asked_of(request.method, request.url, request.post_data_buffer))
    while answer is not None and answer.redirect is not None and not is_navigation:
        answer = replay.answer(asked_of("GET", answer.redirect, None))
    if answer is None or (is_navigation and answer.status in _NO_CONTENT):
        await route.fallback()
    elif answer.redirect is not None:  # no route would see where a real redirect leads
        cookies = {name: value for name, value in answer.headers.items() if name == "set-cookie"}
        address = json.dumps(answer.redirect).replace("<", "\\u003c")
        body = f"<!doctype html><script>location.replace({address})</script>"
        await route.fulfill(status=200, headers=cookies | {"content-type": "text/html"}, body=body)
    else:
        content = b"" if answer.body is None else await asyncio.to_thread(answer.body.read_bytes)
        await route.fulfill(status=answer.status, headers=dict(answer.headers), body=content)
