"""Finding, starting and cleaning up Chromium.

DevTools gives full control of a browser with the rights of its user, so the browser listens on no port: Playwright
starts it and controls it through pipes. If root starts the run, a browser runs as its own user. It runs in
Chromium's sandbox if the kernel allows the namespaces for it, and never gets our environment.

Search order: the environment variable CUA_RL_CHROMIUM; programs on PATH, the headless shell first (it starts faster,
takes less memory and draws more screenshots per second); browsers that Playwright downloaded.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from cua_rl.environments.browser.settings import PageSettings
from cua_rl.host.guest_account import GuestAccount, claim_guest_account
from cua_rl.host.processes import GUARD
from cua_rl.host.scratch import MARK, scratch_folder
from cua_rl.host.users import bare_environment, public_copy
from cua_rl.types.errors import ConfigError, DeviceError, boundary

logger = logging.getLogger(__name__)

VARIABLE = "CUA_RL_CHROMIUM"
PROGRAMS = (
    "chromium-headless-shell",
    "headless_shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
_DOWNLOADED = (
    "chromium_headless_shell-*/chrome*/headless_shell",
    "chromium_headless_shell-*/chrome*/chrome-headless-shell",
    "chromium-*/chrome*/chrome",
)
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-breakpad",
    "--disable-client-side-phishing-detection",
    "--disable-component-extensions-with-background-pages",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-features=Translate,MediaRouter,OptimizationHints,DialMediaRouteProvider,PaintHolding",
    "--disable-gpu",
    "--disable-hang-monitor",
    "--disable-ipc-flooding-protection",
    "--disable-lcd-text",
    "--disable-partial-raster",  # what is redrawn in part differs in the last bit from what is drawn at once
    "--disable-popup-blocking",
    "--disable-prompt-on-repost",
    "--disable-renderer-backgrounding",
    "--disable-smooth-scrolling",  # a wheel's turn is done when it is reported
    "--disable-sync",
    "--force-color-profile=srgb",
    "--metrics-recording-only",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--password-store=basic",
    "--use-mock-keychain",
)


_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0


def find_chromium(environ: Mapping[str, str] = os.environ) -> Path:
    """The program to run; raises `ConfigError` with what to install if there is none."""
    named = environ.get(VARIABLE)
    if named:
        program = shutil.which(named, path=environ.get("PATH"))
        if program is None:
            raise ConfigError(f"{VARIABLE}: expected a Chromium program, got {named!r}; correct or unset it")
        return Path(program)
    for name in PROGRAMS:
        program = shutil.which(name, path=environ.get("PATH"))
        if program is not None:
            return Path(program)
    folder = environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path(environ.get("HOME", "/root")) / ".cache/ms-playwright"
    for pattern in _DOWNLOADED:
        for path in sorted(Path(folder).glob(pattern), reverse=True):
            return path
    raise ConfigError(
        f"expected a Chromium for browser devices, got none of {', '.join(PROGRAMS)} on PATH and none of Playwright's "
        "own; run scripts/install_system_packages.sh (Debian: apt-get install chromium-headless-shell), or set "
        f"{VARIABLE} to a program"
    )


def chromium_command(program: Path, profile: Path, allowed_urls: Sequence[str], scale: float) -> list[str]:
    """The command of a headless browser that reads DevTools requests from file descriptor 3 and responds on 4.

    `scale` is the number of screen pixels per CSS pixel. At the scale of the screenshots, pages are drawn only once.
    """
    # no other host resolves, so prefetches and sockets, which are not page requests, fail too
    hosts = dict.fromkeys(host for url in allowed_urls if (host := urlsplit(url).hostname) is not None)
    excluded = ", ".join(f"EXCLUDE {host}" for host in ("127.0.0.1", *hosts))
    own = (
        f"--force-device-scale-factor={scale!r}",
        f"--host-resolver-rules=MAP * ~NOTFOUND, {excluded}",
        f"--user-data-dir={profile}",
    )
    return [str(program), *_FLAGS, *own, "about:blank"]


def pages_on_disk(allowed_urls: Sequence[str]) -> tuple[str, ...]:
    """The paths of these pages that are files."""
    return tuple(unquote(urlsplit(url).path) for url in allowed_urls if url.startswith("file:"))


if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright


class OwnedBrowser:
    """A Chromium process in its own profile, and Playwright's connection to it; an async context manager."""

    def __init__(
        self, playwright: "Playwright", program: Path, settings: PageSettings, inside: tuple[str, ...]
    ) -> None:
        self._playwright = playwright
        self._program = program
        self._settings = settings
        self._inside = inside
        self._account: GuestAccount | None = None
        self._lifeline: int | None = None
        self._browser: Browser | None = None

    @property
    def is_running(self) -> bool:
        return self._browser is not None and self._browser.is_connected()

    @property
    def connection(self) -> "Browser":
        """Playwright's browser; raises `DeviceError` if it is gone."""
        if self._browser is None or not self.is_running:
            raise DeviceError("expected a running browser, got one that has ended; the next device starts a new one")
        return self._browser

    async def __aenter__(self) -> Self:
        folder = self._program.resolve().parent
        public = await asyncio.to_thread(public_copy, folder)
        program = self._program if public == folder else public / self._program.resolve().name
        files = (str(program), *pages_on_disk(self._settings.allowed_urls))
        self._account = account = await asyncio.to_thread(claim_guest_account, files, "browser", self._inside)
        try:
            await asyncio.to_thread(os.mkfifo, account.home / "lifeline", 0o600)
            reader = os.open(account.home / "lifeline", os.O_RDONLY | os.O_NONBLOCK)  # a writer needs a reader
            self._lifeline = os.open(account.home / "lifeline", os.O_WRONLY)
            os.close(reader)
            self._browser = await self._launch_in_sandbox(program, account)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the browser, its children and its profile; safe to call twice."""
        from playwright.async_api import Error

        if self._lifeline is not None:
            os.close(self._lifeline)  # the guard then ends the browser, even one that hangs
            self._lifeline = None
        if self._browser is not None:
            with suppress(Error, TimeoutError):
                async with asyncio.timeout(2 * _STOP_TIMEOUT_S):
                    await self._browser.close()  # waits for the guard
        if self._account is not None:
            await asyncio.to_thread(self._account.release)
            self._account = None

    async def _launch_in_sandbox(self, program: Path, account: GuestAccount) -> "Browser":
        """Launch in Chromium's sandbox, by kernel namespaces or its setuid helper; without that one if both fail."""
        urls, scale = self._settings.allowed_urls, self._settings.drawn_scale
        command = chromium_command(program, account.home, urls, scale)
        ways = [account.user.command(command)]
        if account.user.uid is None and not account.user.sandbox:
            ways.append(command)  # the helper has to gain privileges
        for way in ways:
            try:
                return await self._launch(way, account)
            except DeviceError as error:
                if not any(word in str(error) for word in _NO_SANDBOX):
                    raise
        _warn_of_no_sandbox()
        return await self._launch([*ways[0], "--no-sandbox"], account)

    async def _launch(self, command: Sequence[str], account: GuestAccount) -> "Browser":
        """Let Playwright start the guard, which starts the browser and passes Playwright's pipes on to it."""
        interpreter, *guard = (*GUARD, str(account.home / "lifeline"), str(_STOP_TIMEOUT_S), *command)
        with boundary(DeviceError, f"start {self._program}"):
            return await self._playwright.chromium.launch(
                executable_path=interpreter,
                args=guard,
                ignore_default_args=True,
                env={**bare_environment(account.home, {MARK: str(scratch_folder())})},
                handle_sigint=False,  # the controller stops its components in order
                handle_sigterm=False,
                handle_sighup=False,
                timeout=_START_TIMEOUT_S * 1000,
            )


_NO_SANDBOX = ("No usable sandbox", "setuid sandbox", "Failed to move to new namespace", "namespace_sandbox")


@cache
def _warn_of_no_sandbox() -> None:
    logger.warning(
        "browsers run without Chromium's sandbox, for which the kernel does not give them namespaces here: a page that "
        "exploits the browser gets the rights of the browser's user; allow unprivileged user namespaces (in a "
        "container, with a seccomp profile that permits them)"
    )
