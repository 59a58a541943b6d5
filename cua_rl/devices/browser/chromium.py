"""Which Chromium to run, and with which flags.

The search, first hit wins: the environment variable CUA_RL_CHROMIUM; programs on PATH, the headless shell first (it
starts faster, takes less memory and draws more screenshots per second); browsers that Playwright downloaded.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cua_rl.errors import ConfigError

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


def find_chromium(environ: Mapping[str, str] = os.environ) -> Path:
    """The program to run; raises `ConfigError` that says what to install."""
    named = environ.get(VARIABLE)
    if named:
        program = shutil.which(named, path=environ.get("PATH"))
        if program is None:
            raise ConfigError(f"{VARIABLE}: expected a Chromium program, got {named!r}; correct or unset it")
        return Path(program)
    for candidate in _candidates(environ):
        return candidate
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
    own = [f"--force-device-scale-factor={scale!r}", _resolver_rules(allowed_urls), f"--user-data-dir={profile}"]
    return [str(program), *_FLAGS, *sandbox, *own, "about:blank"]


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    for name in PROGRAMS:
        program = shutil.which(name, path=environ.get("PATH"))
        if program is not None:
            yield Path(program)
    folder = environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path(environ.get("HOME", "/root")) / ".cache/ms-playwright"
    for pattern in _DOWNLOADED:
        yield from sorted(Path(folder).glob(pattern), reverse=True)


def _resolver_rules(allowed_urls: Sequence[str]) -> str:
    """No other host has an address: what is no page request, such as a prefetch or a socket, ends there too."""
    hosts = dict.fromkeys(host for url in allowed_urls if (host := urlsplit(url).hostname) is not None)
    return f"--host-resolver-rules=MAP * ~NOTFOUND, {', '.join(f'EXCLUDE {host}' for host in ('127.0.0.1', *hosts))}"
