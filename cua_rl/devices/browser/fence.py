"""What keeps a page inside its site: everything else that it requests is refused and counted."""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from cua_rl.devices.browser.page import BrowserPage, Send
from cua_rl.errors import DeviceError, boundary

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession

logger = logging.getLogger(__name__)

_DOCUMENTS = {"patterns": [{"urlPattern": "*", "resourceType": "Document"}]}
_ALL_ELSE = ("*://*:*/*", "file:///*")


async def fence_in(page: BrowserPage, context: "BrowserContext", session: "CDPSession") -> None:
    """Let the page request nothing but what its settings allow."""
    if all(url.startswith("file:") for url in page.settings.allowed_urls):
        await _FileFence(page, session).close()
    else:
        await context.route(page.settings.blocked_urls, page.block)


class _FileFence:
    """The fence of a site of files: only requests for documents wait for us, which makes loading a fifth cheaper.

    Pages of files have neither workers nor frames in other processes, which this fence would not see.
    """

    def __init__(self, page: BrowserPage, session: "CDPSession") -> None:
        self._page = page
        self._session = session
        self._send = cast(Send, session.send)  # pyright: ignore[reportUnknownMemberType] - Playwright leaves it open
        self._decisions: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """From now on, nothing gets out."""
        self._session.on("Fetch.requestPaused", self._begin_to_decide)  # pyright: ignore[reportUnknownMemberType]
        await self._send("Network.enable", {})
        await self._send("Network.setBlockedURLs", {"urlPatterns": url_patterns(self._page.settings.allowed_urls)})
        await self._send("Fetch.enable", _DOCUMENTS)

    def _begin_to_decide(self, paused: dict[str, Any]) -> None:
        decision = asyncio.create_task(self._decide(paused["requestId"], paused["request"]["url"]))
        self._decisions.add(decision)
        decision.add_done_callback(self._decisions.discard)

    async def _decide(self, request_id: str, url: str) -> None:
        try:
            with boundary(DeviceError, f"answer a request of {self._page.device_id}"):
                if self._page.settings.blocked_urls.match(url) is None:
                    await self._send("Fetch.continueRequest", {"requestId": request_id})
                else:
                    self._page.note_blocked()
                    await self._send("Fetch.fulfillRequest", {"requestId": request_id, "responseCode": 204})
                    self._page.note_arrival()
        except DeviceError as error:  # the page has gone; who waits for it is told
            logger.debug("%s", error)


def url_patterns(allowed_urls: Sequence[str]) -> list[dict[str, object]]:
    """What the protocol calls them, first match wins: the allowed beginnings, then all else."""
    allowed = [re.sub(r"([^\w/.%~-])", r"\\\1", url.removeprefix("file://")) for url in allowed_urls]
    return [
        *({"urlPattern": f"file://{path}*", "block": False} for path in allowed),
        *({"urlPattern": pattern, "block": True} for pattern in _ALL_ELSE),
    ]
