"""A page of a browser as a device: actions in pixels of the screenshot, state read from the page itself."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

from pybase64 import b64decode

from cua_rl.environments.browser.hands import mouse_after, perform, require_possible
from cua_rl.environments.browser.page_copy import AIM, FILL, READ, RELEASE, STORE, PageState
from cua_rl.environments.browser.page_scripts import SETTLED
from cua_rl.environments.browser.page_site import CopiedSite, PageSite
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.environments.device import Device
from cua_rl.types.actions import Action, MoveMouse, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import AbsentError, DeviceError, DeviceTimeoutError, TaskError, UnusableError, boundary
from cua_rl.types.json_values import mapping, sequence
from cua_rl.types.snapshot import Snapshot

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Page, Request, Route


logger = logging.getLogger(__name__)

_ENDLESS = ("eventsource", "media", "ping", "websocket")
"""Kinds of requests that nothing on the screen waits for."""
_PROOF_TIMEOUT_S = 10.0


Send = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""A command of the DevTools protocol, by name and parameters; its answer."""

_AWAITED = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
_PNG = {"format": "png", "optimizeForSpeed": True}
_GONE = ("navigat", "context", "collected")
"""Error messages that mean that the document was replaced while a script ran."""


def as_page(device: Device) -> "BrowserPage":
    """The device as a page; raises `TaskError` for another kind of device."""
    if not isinstance(device, BrowserPage):
        raise TaskError(f"expected a page of a browser, got {device.device_id!r}; run page tasks on browser pages")
    return device


class BrowserPage:
    """One page in its own context: cookies and storage are shared with no other page.

    Queries: "url", "title", "text" (what the page shows), and for a CSS selector "text:<selector>", "value:<selector>",
    "checked:<selector>", "count:<selector>"; anything else goes to its site.
    """

    kind: Literal["browser"] = "browser"

    def __init__(
        self,
        page: "Page",
        screen: "CDPSession",
        settings: PageSettings,
        *,
        device_id: str,
        give_back: Callable[["BrowserPage"], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.blocked_hosts = Counter[str]()
        self.num_uses = 0
        self.is_broken = False
        self._is_copying = False  # also afterwards, if this failed: its site may still be at work
        self.site: PageSite | None = None
        self.watch: Callable[[], Awaitable[None]] | None = None
        self._mouse: tuple[int, int] | None = None
        self._page = page
        self._send = cast(Send, screen.send)  # pyright: ignore[reportUnknownMemberType] - Playwright leaves it open
        self.device_id = device_id
        self._give_back = give_back
        self._is_open = True
        self._arrival: asyncio.Event | None = None
        self._unanswered: set[Request] = set()
        self._answered = asyncio.Event()
        self._has_crashed = False
        page.on("crash", self._note_crash)
        page.on("request", self._note_request)
        page.on("requestfinished", self._note_answer)
        page.on("requestfailed", self._note_end)
        page.on("load", self._note_arrival)

    @property
    def url(self) -> str:
        return self._page.url

    @property
    def num_blocked_requests(self) -> int:
        return self.blocked_hosts.total()

    def lend(self) -> None:
        """Open it for its next user."""
        self._is_open = True
        self.num_uses += 1

    async def open_page(self, url: str) -> None:
        """Go to an address and wait until it has loaded; raises `DeviceError`."""
        async with self._operation(f"open {url}"):
            await self._page.goto(url, wait_until="load")
            self._arrival = None
            await self._settle()

    async def leave(self) -> None:
        """Move the mouse to the far corner, where it hovers over nothing."""
        async with self._operation("move the mouse away"):
            await self._page.mouse.move(self.settings.viewport_width - 1, self.settings.viewport_height - 1)

    async def evaluate(self, script: str, argument: object = None) -> object:
        """The value of a JavaScript function in the page, for set-up, validation and experts.

        A document that is replaced meanwhile is waited for. Raises `DeviceError`, and `TaskError` if the script fails.
        """
        from playwright.async_api import Error

        async with self._operation("evaluate a script"):
            while True:
                try:
                    return await self._call(script, argument)
                except Error as error:
                    if not any(word in error.message for word in _GONE):
                        raise
                await self._settle()

    async def observe(self) -> EncodedImage:
        """Take a screenshot of the part that the agent sees."""
        async with self._operation("take a screenshot"):
            png = b64decode((await self._send("Page.captureScreenshot", _PNG))["data"])
        width_px, height_px = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))  # its IHDR
        return EncodedImage(data=png, format="png", width_px=width_px, height_px=height_px)

    async def execute(self, action: Action) -> None:
        """Do one action and wait until the page has settled; raises `ActionRejected` for what a browser cannot do."""
        require_possible(action)
        async with self._operation(type(action).__name__):
            await perform(self._page, action, self.settings)
            self._mouse = mouse_after(action) or self._mouse
            await self._settle()
        if self.watch is not None:
            await self.watch()

    async def snapshot(self) -> Snapshot | None:
        """See `CopiedDevice`; None unless its site can be copied."""
        if not isinstance(site := self.site, CopiedSite):
            return None
        self._is_copying = True
        if self._unanswered:  # what the page has asked may change both
            await _happens(self._answered, time.monotonic() + self.settings.settle_timeout_s)
        state_of_site = await site.snapshot()
        self._is_copying = False
        if state_of_site is None:
            return None
        address = site.url.removesuffix("/")
        document = mapping(await self.evaluate(READ, address))
        async with self._operation("read the history"):
            history = await self._send("Page.getNavigationHistory", {})
            cookies = [dict(cookie) for cookie in await self._page.context.cookies()]
        visited = [str(entry["url"]) for entry in history["entries"]]
        is_blank = visited[0] == "about:blank"  # as every page begins
        state = PageState(
            site=state_of_site,
            addresses=tuple(
                url.removeprefix(address) if url.startswith(site.url) else url for url in visited[is_blank:]
            ),
            place=int(history["currentIndex"]) - is_blank,
            cookies=tuple(cookies),
            document=document,
            mouse=self._mouse,
        )
        return Snapshot(state=state, screen=await self.observe())

    async def restore(self, state: PageState) -> None:
        """Become a copy of another page; raises `DeviceError` if this one, or its site, is then not alike."""
        site = self.site
        assert isinstance(site, CopiedSite), "other pages have no snapshots"
        address, self._is_copying = site.url.removesuffix("/"), True
        await self._restore_site(site, state)
        for visited in state.addresses:
            await self.open_page(f"{address}{visited}" if visited.startswith("/") else visited)
        async with self._operation("go back in the history"):
            for _ in range(len(state.addresses) - 1 - state.place):
                await self._page.go_back(wait_until="load")
        document = mapping(await self.evaluate(READ, address))
        if any(document[part] != state.document[part] for part in ("html", "local", "session")):
            await self._restore_site(site, state)  # loading changed both
            await self.evaluate(STORE, state.document)
            async with self._operation("load the page again"):
                await self._page.reload(wait_until="load")
        await self._restore_site(site, state)
        if not state.document["ring"]:
            await self._press(state.document)
        ended_at, document = time.monotonic() + self.settings.settle_timeout_s, mapping(None)
        while document != state.document and time.monotonic() < ended_at:  # what is shown may be on its way
            if state.mouse is not None:
                await self.execute(MoveMouse(x=state.mouse[0], y=state.mouse[1]))
            await self.evaluate(FILL, state.document)
            await self.execute(Wait(duration_s=0.0))  # until what hears of the focus has asked the site
            document = mapping(await self.evaluate(READ, address))
        state.require_same(document, self.device_id)
        await self._restore_site(site, state)  # and so may what hears of the focus and of the mouse
        self._is_copying = False

    async def _restore_site(self, site: CopiedSite, state: PageState) -> None:
        """Set what is not in the page: the site's own state, and cookies."""
        await site.restore(state.site)
        async with self._operation("set cookies"):
            await self._page.context.clear_cookies()
            await self._page.context.add_cookies(cast("list[Any]", list(state.cookies)))

    async def _press(self, document: Mapping[str, object]) -> None:
        """Give an element the focus as a mouse does, of which it does not hear."""
        if point := sequence(await self.evaluate(AIM, document)):
            async with self._operation("press for the focus"):
                await self._page.mouse.click(*cast("list[float]", list(point)))
            await self.evaluate(RELEASE)

    async def query(self, name: str) -> str:
        """Read one piece of state; raises `AbsentError` without such an element, `TaskError` for an unknown name."""
        match name.partition(":"):
            case ("url", "", ""):
                return self._page.url
            case ("title", "", ""):
                return str(await self.evaluate("() => document.title"))
            case ("text", _, selector):
                return str(await self._of_element("element => element.innerText", selector or "body"))
            case ("value", ":", selector):
                return str(await self._of_element("element => element.value", selector))
            case ("checked", ":", selector):
                return "true" if await self._of_element("element => element.checked", selector) else "false"
            case ("count", ":", selector):
                return str(await self.evaluate("selector => document.querySelectorAll(selector).length", selector))
            case _ if self.site is not None:
                return await self.site.answer(name)
            case _:
                raise TaskError(
                    f"expected a query that a page answers (url, title, text, text:<selector>, value:<selector>, "
                    f"checked:<selector>, count:<selector>), got {name!r}; correct the task"
                )

    async def close(self) -> None:
        """Give the page back; safe to call twice."""
        if self._is_open:
            self._is_open = False
            site, self.site = self.site, None
            is_clean = False
            try:
                await self._give_back(self)
                is_clean = not (self.is_broken or self._is_copying)
            finally:
                if site is not None:
                    await site.release(is_clean=is_clean)

    async def end(self) -> None:
        """Close its context; the page cannot be used again."""
        try:
            with boundary(DeviceError, f"close {self.device_id}"):
                async with asyncio.timeout(self.settings.close_timeout_s):
                    await self._page.context.close()
        except DeviceError as error:  # the page is not needed any more, but its browser may hang
            logger.warning("device_id=%s %s", self.device_id, error)
            self.is_broken = True

    async def block(self, route: "Route") -> None:
        """Block a request that leaves the site; a blocked navigation leaves the page where it is."""
        self.blocked_hosts[urlsplit(route.request.url).netloc] += 1
        if route.request.is_navigation_request():
            await route.fulfill(status=204)
            self._note_arrival()
        else:
            await route.abort("blockedbyclient")

    async def _of_element(self, read: str, selector: str) -> object:
        """Read the first element; what the policy removed or never reached must not pass for an answer."""
        found = f"const found = document.querySelector(selector); return found ? [({read})(found) ?? null] : [];"
        values = cast("list[object]", await self.evaluate(f"selector => {{ {found} }}", selector))
        if not values:
            raise AbsentError(f"expected an element {selector!r} on {self._page.url[:200]}, got none")
        if values[0] is None:
            raise TaskError(f"expected an element {selector!r} with such a property on {self._page.url}, got another")
        return values[0]

    async def _settle(self) -> None:
        """Wait for a navigation in progress, then until the document stops changing or the time limit is reached."""
        settings, began = self.settings, time.monotonic()
        quiet_by = began + settings.settle_timeout_s
        answered_by = quiet_by if self._is_copying else began + settings.answer_timeout_s
        loaded_by = max(quiet_by, began + settings.load_timeout_s)
        while settings.quiet_ms:
            is_settled = await self._is_quiet(quiet_by - time.monotonic())
            if self._arrival is not None:
                if not await _happens(self._arrival, loaded_by):
                    return
                quiet_by = min(loaded_by, time.monotonic() + settings.settle_timeout_s)
            elif self._unanswered and time.monotonic() < answered_by:
                await _happens(self._answered, answered_by)
            elif is_settled or time.monotonic() >= quiet_by:
                return

    async def _is_quiet(self, limit_s: float) -> bool:
        """Whether the document has stopped changing within this time; not if it went away meanwhile."""
        from playwright.async_api import Error

        try:
            timing = {"quietMs": self.settings.quiet_ms, "timeoutMs": max(0.0, limit_s) * 1000}
            return bool(await self._call(SETTLED, timing))
        except TaskError:  # the page's own scripts broke what it needs
            return True
        except Error as error:
            if not any(word in error.message for word in _GONE):
                raise
            return False

    async def _browser_draws(self) -> bool:
        """Whether the browser draws another page, so that its machine is not what is slow."""
        try:
            with boundary(DeviceError, "draw a blank page"):
                browser = self._page.context.browser
                if browser is None:
                    return False
                async with asyncio.timeout(_PROOF_TIMEOUT_S):
                    context = await browser.new_context()
                    try:
                        await (await context.new_page()).screenshot()
                    finally:
                        await context.close()
        except DeviceError:
            return False
        return True

    async def _call(self, script: str, argument: object) -> object:
        """Call a JavaScript function over DevTools, in half the time that Playwright's `evaluate` takes."""
        call = f"({script})({json.dumps(argument)})"
        answer = await self._send("Runtime.evaluate", {"expression": call} | _AWAITED)
        if "exceptionDetails" in answer:
            told = answer["exceptionDetails"]
            raise TaskError(
                f"expected the script to end well on {self._page.url}, it raised "
                f"{told.get('exception', {}).get('description', told['text'])!r}; correct the page or the task"
            )
        return cast(object, answer["result"].get("value"))

    def _note_request(self, request: "Request") -> None:
        """Record the start of a navigation; redirects belong to the same navigation."""
        is_leaving = request.is_navigation_request() and request.frame == self._page.main_frame
        if is_leaving and self._arrival is None:
            self._arrival = asyncio.Event()
        if is_leaving:
            self._unanswered.clear()  # nothing waits for what the last document has requested
        if request.resource_type not in _ENDLESS:
            self._unanswered.add(request)
            self._answered.clear()

    def _note_answer(self, request: "Request") -> None:
        self._unanswered.discard(request)
        if not self._unanswered:
            self._answered.set()

    def _note_crash(self, _: object) -> None:
        self._has_crashed = True

    def _note_end(self, request: "Request") -> None:
        self._note_answer(request)
        if request.is_navigation_request() and request.frame == self._page.main_frame:
            self._note_arrival()

    def _note_arrival(self, *_: object) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

    @asynccontextmanager
    async def _operation(self, doing: str) -> AsyncGenerator[None]:
        """Raise any failure of the page or browser, including a timeout, as a `DeviceError`."""
        # It is an `UnusableError` if only the page hangs, crashed or was closed, while its browser draws another one.
        limit_s = self.settings.operation_timeout_s
        if not self._is_open:
            raise DeviceError(f"expected an open page to {doing}, got {self.device_id!r}, which was returned")
        try:
            with boundary(DeviceError, f"{doing} on {self.device_id}"):
                async with asyncio.timeout(limit_s):
                    yield
        except DeviceError as error:
            self.is_broken = True
            is_late = isinstance(error.__cause__, TimeoutError)
            if (is_late or self._has_crashed or self._page.is_closed()) and await self._browser_draws():
                raise UnusableError(
                    f"expected {self.device_id} to {doing} within {limit_s:g} s, it did not although its browser "
                    "draws other pages: what was done on the page makes it hang, or ended it"
                ) from error
            if is_late:
                raise DeviceTimeoutError(
                    f"expected {self.device_id} to {doing} within {limit_s:g} s, it did not: the browser is stuck or "
                    "the machine overloaded; run fewer devices"
                ) from error
            raise


async def _happens(event: asyncio.Event, by: float) -> bool:
    """Whether it happens before this time of the monotonic clock."""
    try:
        async with asyncio.timeout(max(0.0, by - time.monotonic())):
            await event.wait()
    except TimeoutError:
        return False
    return True
