"""Settings of browser pages: viewport, scale, timing, allowed addresses; commands of the site's server."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cua_rl.types.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Size of the top left part of the viewport that the agent sees, CSS pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """A screenshot has the clip's size (the viewport's if there is none) times `scale`."""

    allowed_urls: tuple[str, ...]
    """Prefixes of addresses that pages may request; all other requests are blocked and counted.

    A `*` in one stands for any part of a host's name.
    """
    viewport_width: int = 1024
    viewport_height: int = 768
    clip: Clip | None = None
    scale: float = 1.0
    """Pages are rendered at this scale, not resized."""
    quiet_ms: int = 50
    """The screen counts as settled after this time without a change; 0 for pages that change at once or never."""
    settle_timeout_s: float = 5.0
    """Longest wait for a page to settle."""
    answer_timeout_s: float = 0.0
    """Longest wait for what a page has requested in the background; 0 does not wait."""
    load_timeout_s: float = 0.0
    """Longest wait for another page that is on its way, if longer than `settle_timeout_s`."""
    close_timeout_s: float = 5.0
    """Longest wait for a page to close."""
    operation_timeout_s: float = 60.0
    """Operations that take longer mark the page as broken."""

    def __post_init__(self) -> None:
        if not self.allowed_urls:
            raise ConfigError("allowed_urls: expected at least one beginning of an address, got none; name the site's")
        if not 0 < self.scale <= 4:
            raise ConfigError(f"scale: expected a number above 0 and at most 4, got {self.scale!r}; change it")
        seen = self.seen
        if seen.width > self.viewport_width or seen.height > self.viewport_height:
            raise ConfigError(f"clip: expected a part of the viewport, got {seen!r}; enlarge the viewport")

    @property
    def seen(self) -> Clip:
        """The clip, or the whole viewport."""
        return self.clip or Clip(width=self.viewport_width, height=self.viewport_height)

    @property
    def drawn_scale(self) -> float:
        """The scale for the browser, at most `scale` in its single precision: else 1.2 would make 253 rows of 252."""
        (single,) = struct.unpack("f", struct.pack("f", self.scale))
        return self.scale if single <= self.scale else self.scale - 1e-6

    @property
    def blocked_urls(self) -> re.Pattern[str]:
        """A pattern that all addresses but the allowed ones match, in the syntax common to Python and JavaScript."""
        beginnings = (*self.allowed_urls, "data:", "blob:", "about:")
        allowed = "|".join(re.escape(beginning).replace(r"\*", r"[\w.-]*") for beginning in beginnings)
        return re.compile(f"^(?!{allowed})")

    @property
    def reached_hosts(self) -> tuple[str, ...]:
        """Hosts and ports that pages may reach, for requests that routes do not see."""
        parts = [urlsplit(url) for url in self.allowed_urls]
        names = [(part, f"[{part.hostname}]" if ":" in (part.hostname or "") else part.hostname) for part in parts]
        return tuple(
            # "http://127.0.0.1" is a prefix of addresses with any port
            f"{name}:{part.port or _DEFAULT_PORTS.get(part.scheme, 80)}" if part.port or part.path else name
            for part, name in names
            if name and part.port != 0  # port 0 allows nothing: no server listens on it
        )


RESET_METHODS = ("GET", "POST", "PUT", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteProgram:
    """The commands of a site's server; `{port}` and `{url}` in them are replaced."""

    command: str
    folder: Path
    """Working folder of both commands. The server may not be able to write to it, but has its own HOME."""
    reset: str | None = None
    """A request such as "POST /api/reset", or a command; None starts a new server for every rollout, "" keeps it."""
    snapshot: str | None = None
    """A request that answers with the server's state, or a command that writes it to the file `CUA_STATE_PATH`."""
    restore: str | None = None
    """A request with a state as its body, or a command that reads it from `CUA_STATE_PATH`; with `snapshot` alone."""
