"""Finding, starting and cleaning up Chromium.

The search, first hit wins: the environment variable CUA_RL_CHROMIUM; programs on PATH, the headless shell first (it
starts faster, takes less memory and draws more screenshots per second); browsers that Playwright downloaded.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from cua_rl.errors import ConfigError, DeviceError, boundary
from cua_rl.processes import OwnedProcess
from cua_rl.system import is_running, processes_with_argument

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
    "--remote-debugging-port=0",
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


_PREFIX = "cua_rl_browser_"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02


def find_chromium(environ: Mapping[str, str] = os.environ) -> Path:
    """The program to run; raises `ConfigError` that says what to install."""
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
    """The command that runs a browser without a window, debugged through a port named in the profile's folder.

    `scale` is how many pixels of its screen a CSS pixel has: what is drawn once at the size of the screenshot need not
    be drawn again for every screenshot.
    """
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox for root
    # no other host is resolved, so that prefetches and sockets, which are not page requests, fail too
    hosts = dict.fromkeys(host for url in allowed_urls if (host := urlsplit(url).hostname) is not None)
    excluded = ", ".join(f"EXCLUDE {host}" for host in ("127.0.0.1", *hosts))
    own = (
        f"--force-device-scale-factor={scale!r}",
        f"--host-resolver-rules=MAP * ~NOTFOUND, {excluded}",
        f"--user-data-dir={profile}",
    )
    return [str(program), *_FLAGS, *sandbox, *own, "about:blank"]


def make_profile(folder: Path | None = None) -> Path:
    """A new folder for a browser of this process."""
    parent = folder or Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=parent))


def remove_profile(profile: Path) -> None:
    """Delete the folder; a browser that is still ending may write into it meanwhile."""
    for _ in range(3):
        shutil.rmtree(profile, ignore_errors=True)
        if not profile.exists():
            return


def remove_leftovers(folder: Path | None = None) -> int:
    """Kill browsers whose owner is gone and delete their profiles; returns the number of profiles."""
    parent = folder or Path(tempfile.gettempdir())
    abandoned = [profile for profile in parent.glob(f"{_PREFIX}*") if not _has_owner(profile)]
    for profile in abandoned:
        # by their argument: the pid in a file could long be someone else's
        for pid in processes_with_argument(f"--user-data-dir={profile}"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        remove_profile(profile)
    return len(abandoned)


def _has_owner(profile: Path) -> bool:
    pid = profile.name.removeprefix(_PREFIX).partition("_")[0]
    if not pid.isdigit() or is_running(int(pid)):
        return True
    try:
        return profile.stat().st_uid != os.getuid()
    except FileNotFoundError:
        return True


if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright


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

    async def __aexit__(self, *error: object) -> None:
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
            with suppress(FileNotFoundError):
                lines = (await asyncio.to_thread(port_file.read_text, encoding="utf-8")).split("\n")
                if len(lines) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(_POLL_S)
        raise DeviceError(
            f"expected {self._program} to start within {_START_TIMEOUT_S:g} s, it did not; the end of its log:\n"
            f"{process.log_tail(10)}"
        )
