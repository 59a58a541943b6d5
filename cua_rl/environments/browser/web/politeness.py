"""Politeness to web sites: few pages at a time, time between their loads, and what robots.txt says to programs."""

import asyncio
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from cua_rl.types.errors import DeviceServiceError, boundary

AGENT = "cua_rl"
"""The name by which robots.txt may address us."""
_ROBOTS_TIMEOUT_S = 20.0
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
        self._rules: dict[str, RobotFileParser] = {}
        self._fetching: dict[str, asyncio.Lock] = {}

    def places(self, site: str, max_pages: int) -> asyncio.Semaphore:
        """The places of a site, one for each page at a time."""
        return self._places.setdefault(site, asyncio.Semaphore(max_pages))

    async def pace(self, url: str, interval_s: float) -> None:
        """Wait until the site may be asked for another page, at least this time after the last one."""
        site, now = site_of(url), asyncio.get_running_loop().time()
        at = max(now, self._next_load_at.get(site, 0.0))
        rules = self._rules.get(_origin(url))
        delay_s = 0.0 if rules is None else float(rules.crawl_delay(AGENT) or 0.0)
        self._next_load_at[site] = at + max(interval_s, delay_s)
        await asyncio.sleep(at - now)

    async def allows(self, url: str) -> bool:
        """Whether robots.txt lets programs load it; raises `DeviceServiceError` if the server does not say."""
        origin = _origin(url)
        async with self._fetching.setdefault(origin, asyncio.Lock()):
            if origin not in self._rules:
                self._rules[origin] = await _fetch_rules(origin)
        return self._rules[origin].can_fetch(AGENT, url)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


async def _fetch_rules(origin: str) -> RobotFileParser:
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
    rules = RobotFileParser(url)
    rules.parse(response.text.splitlines() if response.is_success else [])
    return rules
