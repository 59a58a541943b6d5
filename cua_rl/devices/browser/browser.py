"""A running Chromium, owned: it ends with whoever entered it, however that ends."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cua_rl.devices.browser.chromium import chromium_command
from cua_rl.devices.browser.janitor import make_profile, remove_profile
from cua_rl.errors import DeviceError, boundary
from cua_rl.processes import OwnedProcess

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

_START_TIMEOUT_S = 60.0
_POLL_S = 0.02


class OwnedBrowser:
    """A Chromium process in a profile of its own, and Playwright's connection to it; an async context manager."""

    def __init__(self, playwright: "Playwright", program: Path, allowed_urls: Sequence[str], scale: float) -> None:
        self._playwright = playwright
        self._program = program
        self._allowed_urls = tuple(allowed_urls)
        self._scale = scale
        self._profile: Path | None = None
        self._process: OwnedProcess | None = None
        self._browser: Browser | None = None

    @property
    def is_running(self) -> bool:
        return (
            self._process is not None
            and self._process.is_running
            and self._browser is not None
            and self._browser.is_connected()
        )

    @property
    def connection(self) -> "Browser":
        """Playwright's browser; raises `DeviceError` if it is gone."""
        if self._browser is None or not self.is_running:
            raise DeviceError("expected a running browser, got one that has ended; the next device starts a new one")
        return self._browser

    async def __aenter__(self) -> Self:
        self._profile = await asyncio.to_thread(make_profile)
        command = chromium_command(self._program, self._profile, self._allowed_urls, self._scale)
        self._process = OwnedProcess(
            command, name="chromium", log_path=self._profile / "chromium.log", stop_timeout_s=3.0
        )
        try:
            await self._process.start()
            address = await self._wait_for_address(self._process, self._profile / "DevToolsActivePort")
            with boundary(DeviceError, "connect to the browser"):
                self._browser = await self._playwright.chromium.connect_over_cdp(address)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the browser, its children and its profile; safe to call twice."""
        if self._process is not None:
            await self._process.stop()
        if self._profile is not None:
            await asyncio.to_thread(remove_profile, self._profile)

    async def _wait_for_address(self, process: OwnedProcess, port_file: Path) -> str:
        """Chromium writes port and path of its debugging socket into its profile once it listens."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and process.is_running:
            lines = await asyncio.to_thread(_read_lines, port_file)
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(_POLL_S)
        raise DeviceError(
            f"expected {self._program} to start within {_START_TIMEOUT_S:g} s, it did not; its last words:\n"
            f"{process.log_tail(10)}"
        )


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
