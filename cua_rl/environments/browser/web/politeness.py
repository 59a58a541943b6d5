"""Politeness to web sites: few pages at a time, time between their loads, and what robots.txt says to programs."""

import asyncio
import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

from cua_rl.types.errors import DeviceServiceError, boundary

AGENT = "cua_rl"
"""The name by which robots.txt may address us."""
MAX_WAIT_S = 30.0
"""How long a page waits for a document, its turn included."""
_ROBOTS_TIMEOUT_S = 20.0
_Rules = Sequence[tuple[str, str]]
"""What a robots.txt says to us: allow or disallow with a path, or crawl-delay with seconds."""
_SECOND_LEVEL = frozenset({"ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"})


def site_of(url: str) -> str:
    """The part of an address that one owner registers, such as "example.com", with its port if there is one.

    Without the list of public suffixes: the last two labels of the host, or three as in "bbc.co.uk".
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    labels = host.split(".")
    if labels[-1].isdigit() or ":" in host:  # an IP address
        return parts.netloc.rpartition("@")[2]
    is_long = len(labels[-1]) == 2 and labels[-2:-1] and labels[-2] in _SECOND_LEVEL
    name = ".".join(labels[-3 if is_long else -2 :])
    return name if parts.port is None else f"{name}:{parts.port}"


class Politeness:
    """What the pages of this process do to each site."""

    def __init__(self) -> None:
        self._places: dict[str, asyncio.Semaphore] = {}
        self._next_load_at: dict[str, float] = {}
        self._rules: dict[str, _Rules] = {}
        self._fetching: dict[str, asyncio.Lock] = {}

    def places(self, url: str, max_pages: int) -> asyncio.Semaphore:
        """The places of a site, one for each page at a time; fewer if pages would wait too long for their turn."""
        fitting = max(1, int(MAX_WAIT_S / max(self.delay_s(url), 1e-3)))
        return self._places.setdefault(site_of(url), asyncio.Semaphore(min(max_pages, fitting)))

    def delay_s(self, url: str) -> float:
        """What robots.txt asks for between two pages, as far as it has been read."""
        said = [value for word, value in self._rules.get(_origin(url), ()) if word == "crawl-delay"]
        return max((float(value) for value in said if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value)), default=0.0)

    async def pace(self, url: str, interval_s: float) -> None:
        """Wait until the site may be asked for another page, at least this time after the last one."""
        site, now = site_of(url), asyncio.get_running_loop().time()
        at = max(now, self._next_load_at.get(site, 0.0))
        self._next_load_at[site] = at + max(interval_s, self.delay_s(url))
        await asyncio.sleep(at - now)

    async def allows(self, url: str) -> bool:
        """Whether robots.txt lets programs load it; raises `DeviceServiceError` if the server does not say."""
        origin = _origin(url)
        async with self._fetching.setdefault(origin, asyncio.Lock()):
            if origin not in self._rules:
                self._rules[origin] = await _fetch_rules(origin)
        parts = urlsplit(url)
        path = unquote(f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/")
        rules = [(rule, word == "allow") for word, rule in self._rules[origin] if word != "crawl-delay"]
        hits = [(len(rule), is_allowed) for rule, is_allowed in rules if covers(rule, path)]
        return max(hits, default=(0, True))[1]  # the longest rule decides, and of two as long, the one that allows


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def covers(rule: str, path: str) -> bool:
    """Whether a rule is about a path: `*` stands for any text, `$` at the end for the end of the path."""
    whole = "*".join(escape(unquote(part)) for part in rule.removesuffix("$").split("*"))
    return bool(rule) and fnmatchcase(path, whole if rule.endswith("$") else f"{whole}*")


def read_rules(text: str) -> _Rules:
    """The rules of a robots.txt for our name or, if no group has it, for all (RFC 9309)."""
    rules, names, is_named = defaultdict[str, list[tuple[str, str]]](list), list[str](), False
    for line in text.removeprefix("\ufeff").splitlines():
        word, _, value = line.partition("#")[0].partition(":")
        word, value = word.strip().lower(), value.strip()
        if word == "user-agent":
            names, is_named = [*(names if is_named else ()), value.lower()], True
        elif word in ("allow", "disallow", "crawl-delay"):
            is_named = False
            for name in names:
                rules[name].append((word, value))
    return rules[AGENT if AGENT in rules else "*"]


async def _fetch_rules(origin: str) -> _Rules:
    """What the robots.txt of a server says; as RFC 9309 has it, everything is allowed if the server has none."""
    import httpx

    url = f"{origin}/robots.txt"
    with boundary(DeviceServiceError, f"fetch {url}"):
        async with httpx.AsyncClient(
            timeout=_ROBOTS_TIMEOUT_S, trust_env=False, follow_redirects=True, headers={"User-Agent": AGENT}
        ) as client:
            response = await client.get(url)
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        raise DeviceServiceError(f"expected {url} or its absence, got status {response.status_code}; try again later")
    return read_rules(response.text) if response.is_success else ()
