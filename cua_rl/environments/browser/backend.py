"""The pool of browser pages: browsers with many contexts each, replaced when they crash."""

import asyncio
import logging
import os
import shlex
import tempfile
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from cua_rl.environments.browser.chromium import OwnedBrowser, find_chromium, pages_on_disk
from cua_rl.environments.browser.page import BrowserPage, Send
from cua_rl.environments.browser.page_scripts import init_script
from cua_rl.environments.browser.page_site import PageSite
from cua_rl.environments.browser.served_site import SiteServers
from cua_rl.environments.browser.settings import Clip, PageSettings
from cua_rl.environments.browser.site_network import SiteNetwork, open_site_network
from cua_rl.host.guest_account import claim_guest_account
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import bare_environment
from cua_rl.types.errors import ConfigError, DeviceError, boundary

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Playwright

logger = logging.getLogger(__name__)

PAGES_PER_BROWSER = 16
"""More pages per browser save memory; fewer share its main thread."""
MAX_USES = 500
"""A page is replaced after this many rollouts to bound its renderer's memory."""

_NODE = "PLAYWRIGHT_NODEJS_PATH"
_PLAYWRIGHTS = 'PW_LANG_NAME="$PW_LANG_NAME" PW_LANG_NAME_VERSION="$PW_LANG_NAME_VERSION"'
_NO_PROXY = "http://nowhere.invalid:1"

_serial_numbers = count(1)


@dataclass(slots=True)
class _Host:
    """A browser and the pages that live in it."""

    browser: OwnedBrowser
    inside: tuple[str, ...]
    pages: set[BrowserPage] = field(default_factory=set[BrowserPage])


class BrowserPages:
    """Lends pages; an async context manager that owns Playwright and all browsers.

    Up to `max_idle` pages keep their state for the next user with the same key, or for any user once that many exist,
    which requires tasks that reset the page. At 0, every user gets a fresh context.
    """

    def __init__(self, settings: PageSettings, *, max_idle: int = 0, program: Path | None = None) -> None:
        require_playwright()
        self.settings = settings
        self._program = program or find_chromium()
        self._max_idle = max_idle
        self._stack = AsyncExitStack()
        self._network = SiteNetwork()
        self._playwright: Playwright | None = None
        self._hosts: list[_Host] = []
        self._idle: list[tuple[str, BrowserPage]] = []
        self._keys: dict[BrowserPage, str] = {}
        self._starting = asyncio.Lock()
        self.num_browsers_started = 0

    async def __aenter__(self) -> Self:
        from playwright.async_api import async_playwright

        files = ("true", *pages_on_disk(self.settings.allowed_urls))
        await asyncio.to_thread(lambda: claim_guest_account(files, "pages").release())  # raises if it cannot read them
        os.environ[_NODE] = await asyncio.to_thread(_bare_node)
        try:
            self._playwright = await self._stack.enter_async_context(async_playwright())
            await self._open_sites()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for host in self._hosts:
            await host.browser.close()
        self._hosts.clear()
        self._idle.clear()
        await self._stack.aclose()

    async def _open_sites(self) -> None:
        """What pages of one kind need beside a browser."""

    def _settings_for(self, site: PageSite | None) -> PageSettings:
        """The settings of a page on this site."""
        own_urls = () if site is None else (site.url,)
        return replace(self.settings, allowed_urls=(*own_urls, *self.settings.allowed_urls))

    async def _equip(self, context: "BrowserContext", page: BrowserPage, site: PageSite | None) -> None:
        """What a page of one kind needs beside its scripts; its routes come before the one that blocks."""

    async def _open_servers(self, other_urls: Collection[str] = ()) -> SiteServers:
        """Servers of pages that may also request these addresses, in their network; they end with the pages."""
        self._network = await self._stack.enter_async_context(open_site_network(other_urls))
        servers = SiteServers(self._network)
        self._stack.push_async_callback(servers.close)
        return servers

    async def lend(self, key: str = "", *, site: PageSite | None = None) -> BrowserPage:
        """A page for one user, returned with `close`; raises `DeviceError`.

        With a site, the page is fresh and may request it besides `allowed_urls`; the site is released with the page.
        """
        try:
            page = (self._take_idle(key) if site is None else None) or await self._make_page(site)
        except BaseException:
            if site is not None:
                await site.release()
            raise
        self._keys[page] = key
        page.site = site
        page.lend()
        return page

    def _take_idle(self, key: str) -> BrowserPage | None:
        """An idle page with this key, or, once `max_idle` pages exist, one with another key, which has to reload."""
        self._idle = [(name, page) for name, page in self._idle if self._host_of(page) is not None]
        place = next((place for place, (name, _) in enumerate(self._idle) if name == key), None)
        if place is None and self._idle and sum(len(host.pages) for host in self._hosts) >= self._max_idle:
            place = 0
        return None if place is None else self._idle.pop(place)[1]

    async def _make_page(self, site: PageSite | None) -> BrowserPage:
        host = await self._find_host(() if site is None else self._network.inside)
        settings = self._settings_for(site)
        with boundary(DeviceError, "make a page"):
            async with asyncio.timeout(settings.operation_timeout_s):
                context = await host.browser.connection.new_context(
                    viewport={"width": settings.viewport_width, "height": settings.viewport_height},
                    device_scale_factor=settings.drawn_scale,
                    accept_downloads=False,
                    locale="en-US",
                    timezone_id="UTC",
                    service_workers="block",
                    # routes see neither redirects nor sockets, so a proxy that does not exist blocks other hosts
                    proxy={"server": _NO_PROXY, "bypass": ",".join(("<-loopback>", *settings.reached_hosts))},
                )
                context.set_default_timeout(settings.operation_timeout_s * 1000)
                await context.add_init_script(init_script(settings.seen.width, settings.seen.height))
                inner = await context.new_page()
                if settings.clip is not None:
                    await _show_only(settings.clip, settings, await context.new_cdp_session(inner))
                page = BrowserPage(
                    inner,
                    await context.new_cdp_session(inner),
                    settings,
                    device_id=f"browser-{next(_serial_numbers)}",
                    give_back=self._take_back,
                )
                await context.route(settings.blocked_urls, page.block)
                await self._equip(context, page, site)
        host.pages.add(page)
        return page

    async def _find_host(self, inside: tuple[str, ...]) -> _Host:
        """The first browser there below its limit of pages, else a new one; dead ones are removed with their pages."""
        async with self._starting:
            for host in [host for host in self._hosts if not host.browser.is_running]:
                logger.warning("a browser with %d pages has ended; a new one takes its place", len(host.pages))
                self._hosts.remove(host)
                await host.browser.close()
            for host in self._hosts:
                if host.inside == inside and len(host.pages) < PAGES_PER_BROWSER:
                    return host
            if self._playwright is None:
                raise RuntimeError("expected the pages to be entered first")
            browser = OwnedBrowser(self._playwright, self._program, self.settings, inside)
            await browser.__aenter__()
            self.num_browsers_started += 1
            self._hosts.append(_Host(browser, inside))
            return self._hosts[-1]

    async def _take_back(self, page: BrowserPage) -> None:
        key = self._keys.pop(page, "")
        host = self._host_of(page)
        if page.num_blocked_requests:
            most = ", ".join(host for host, _ in page.blocked_hosts.most_common(5))
            logger.info("device_id=%s blocked %d requests, to %s", page.device_id, page.num_blocked_requests, most)
            page.blocked_hosts.clear()
        if host is None:
            return
        is_kept = len(self._idle) < self._max_idle and not page.is_broken and page.num_uses < MAX_USES
        if is_kept:
            self._idle.append((key, page))
            return
        await page.end()
        host.pages.discard(page)
        if page.is_broken and host.browser.is_running and not host.pages:
            await host.browser.close()  # a page that cannot be closed may have blocked its browser

    def _host_of(self, page: BrowserPage) -> _Host | None:
        return next((host for host in self._hosts if page in host.pages and host.browser.is_running), None)


async def _show_only(clip: Clip, settings: PageSettings, session: "CDPSession") -> None:
    """Lay out the page for the viewport, in a window of the size of the clip."""
    # Screenshots then need no clip, which would resize the page twice. The session must be used for nothing else,
    # because screenshots through a session with emulation resize the page too, and must stay open, because closing it
    # ends the emulation.
    send = cast(Send, session.send)  # pyright: ignore[reportUnknownMemberType] - Playwright leaves it open
    size = {"width": settings.viewport_width, "height": settings.viewport_height}
    screen = {"deviceScaleFactor": settings.drawn_scale, "mobile": False, "dontSetVisibleSize": True}
    await send("Emulation.setDeviceMetricsOverride", size | screen)
    await send("Emulation.setVisibleSize", {"width": clip.width, "height": clip.height})


@cache
def _bare_node() -> str:
    """Starts Playwright's driver without our variables, which other programs of our user could read."""
    import playwright

    node = os.environ.get(_NODE) or str(Path(playwright.__file__).parent / "driver" / "node")
    variables = bare_environment(Path.home(), {"TMPDIR": tempfile.gettempdir()})
    words = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items())])
    script = make_scratch_folder("node") / "node"
    script.write_text(f'#!/bin/sh\nexec {words} {_PLAYWRIGHTS} {shlex.quote(node)} "$@"\n')
    script.chmod(0o700)
    if os.access(script, os.X_OK):
        return str(script)
    logger.warning("Playwright's driver keeps our environment: no program can be started in %s", script.parent)
    return node


def require_playwright() -> None:
    """Raise `ConfigError` unless Playwright is installed."""
    if find_spec("playwright") is None:
        raise ConfigError("expected Playwright for browser devices, it is not installed; pip install 'cua_rl[browser]'")
