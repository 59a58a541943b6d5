"""Viewport, scale, timing and allowed addresses of browser pages; the servers that come with them."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cua_rl.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The top left part of the viewport, which the agent sees, CSS pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """A screenshot has the clip's size (the viewport's if there is none) times `scale`."""

    allowed_urls: tuple[str, ...]
    """Beginnings of addresses that pages may request; what begins otherwise is blocked and counted."""
    viewport_width: int = 1024
    viewport_height: int = 768
    clip: Clip | None = None
    scale: float = 1.0
    """Pages are rendered at this scale, not resized."""
    quiet_ms: int = 50
    """The screen has settled once the page has not changed for so long; 0 for pages that change at once or never."""
    settle_timeout_s: float = 5.0
    """Longest wait for a page to settle."""
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
        """The scale as browsers are told: in their single precision 1.2 is a little more, and 252 rows would be 253."""
        (single,) = struct.unpack("f", struct.pack("f", self.scale))
        return self.scale if single <= self.scale else self.scale - 1e-6

    @property
    def blocked_urls(self) -> re.Pattern[str]:
        """What every other address matches; in the dialect that Python and JavaScript share."""
        allowed = "|".join(re.escape(beginning) for beginning in (*self.allowed_urls, "data:", "blob:", "about:"))
        return re.compile(f"^(?!{allowed})")

    @property
    def reached_hosts(self) -> tuple[str, ...]:
        """Hosts with the ports that pages may reach: what requests that are never asked about are held to."""
        parts = [urlsplit(url) for url in self.allowed_urls]
        names = [(part, f"[{part.hostname}]" if ":" in (part.hostname or "") else part.hostname) for part in parts]
        return tuple(
            # "http://127.0.0.1" alone is the beginning of the addresses of all ports
            f"{name}:{part.port or _DEFAULT_PORTS.get(part.scheme, 80)}" if part.port or part.path else name
            for part, name in names
            if name and part.port != 0  # nothing listens on port 0: an address of it allows nothing
        )


RESET_METHODS = ("GET", "POST", "PUT", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteProgram:
    """How the server of a site is run. `command` and `reset` may name the `{port}` and the `{url}`."""

    command: str
    folder: Path
    """Where both commands run; the server may not be able to write here, but has a HOME of its own."""
    reset: str | None = None
    """A request such as "POST /api/reset", or a command; None starts a new server for every rollout."""
