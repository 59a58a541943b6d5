"""Heads and bodies of requests: the host they name, and what a body may hold, whatever its source.

the endpoint asks for the key, from the head alone
  └ body: bounded in bytes and time while it arrives         read_body
      └ JSON: bounded in values and depth, off the loop      read_json
"""

import asyncio
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request

from cua_rl.types.errors import CuaError
from cua_rl.types.json_values import is_object, sequence

BODY_S, MIN_BYTES_PER_S = 10.0, 100_000
"""A body may take this long, plus the time that its size takes at this rate."""
MAX_VALUES = 2_000_000
"""Limit for the values in a JSON body: they take at most 150 MB and 0.8 s of one core, half of it holding the GIL."""
MAX_DEPTH = 64
_INLINE_BYTES = 64 * 2**10  # parsed within a millisecond, about what a thread costs


class RequestRefused(CuaError):
    """A request whose head or body violates a general limit."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def host_name(host: str) -> str:
    """The name in a Host header or an address, without its port; empty if there is none."""
    try:
        return urlsplit(host if "//" in host else f"//{host}").hostname or ""
    except ValueError:
        return ""


def bearer_key(request: Request) -> str:
    """The key in `Authorization: Bearer`, empty if there is none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


@dataclass(slots=True)
class BodyBudget:
    """Limit for the bodies of all open requests of a client together."""

    max_bytes: int
    num_bytes: int = 0

    @contextmanager
    def hold(self) -> Generator["HeldBody"]:
        """The share of one request, returned at the end of the block."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            held.release()


@dataclass(slots=True)
class HeldBody:
    """The bytes of one body."""

    budget: BodyBudget
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Take bytes from the budget; raises `RequestRefused` if too few are left."""
        if self.num_bytes + num_bytes > self.budget.max_bytes:
            raise RequestRefused(413, f"expected a body of at most {self.budget.max_bytes} bytes; send smaller ones")
        if self.budget.num_bytes + num_bytes > self.budget.max_bytes:
            raise RequestRefused(429, "expected fewer large bodies at once, got more; wait for an answer")
        self.budget.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Return all of them to the budget."""
        self.budget.num_bytes -= self.num_bytes
        self.num_bytes = 0


def require_json(request: Request) -> None:
    """Raise `RequestRefused` for other content types, which browsers send to other sites without a CORS preflight.

    A request with a bearer key may have any type, or none: browsers do not send that header without a preflight.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not bearer_key(request):
        raise RequestRefused(415, f"expected Content-Type: application/json, got {kind[:100]!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestRefused(415, f"expected a body without Content-Encoding, got {encoding[:100]!r}; send it as it is")


async def read_body(request: Request, held: HeldBody) -> bytes:
    """The body, counted while it arrives; raises `RequestRefused` if it is too long, too slow or not finished."""
    loop = asyncio.get_running_loop()
    started, body = loop.time(), bytearray()
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and int(told[:20]) > held.budget.max_bytes:
        held.add(int(told[:20]))
    try:
        async with asyncio.timeout_at(started + BODY_S) as deadline:
            async for piece in request.stream():
                held.add(len(piece))
                body += piece
                deadline.reschedule(started + BODY_S + len(body) / MIN_BYTES_PER_S)
    except TimeoutError:
        raise RequestRefused(408, f"expected the whole body in time, got {len(body)} bytes; send it faster") from None
    except ClientDisconnect:
        raise RequestRefused(400, f"expected a whole body, the client left after {len(body)} bytes") from None
    return bytes(body)


async def read_json(request: Request, held: HeldBody, shorten: Callable[[bytes], bytes] = bytes) -> object:
    """The body as JSON, once `shorten` has replaced what is known of it; raises `RequestRefused`."""
    return await parse_body(await read_body(request, held), shorten)


async def parse_body(body: bytes, shorten: Callable[[bytes], bytes] = bytes) -> object:
    """JSON, parsed in a thread if it is large; raises `RequestRefused`."""
    if len(body) <= _INLINE_BYTES:
        return parse_json(shorten(body))
    return await asyncio.to_thread(lambda: parse_json(shorten(body)))


def parse_json(text: bytes | str) -> object:
    """A JSON value of limited size and depth.

    The limit is checked before the parser runs, because it holds the interpreter's lock to its end: a thread alone
    would not keep the event loop free.

    Raises:
        RequestRefused: the text is not JSON; the parser's error is its cause.
    """
    counts = [
        text.count(mark.encode()) if isinstance(text, bytes) else text.count(mark) for mark in (",", ":", "[", "{")
    ]
    if sum(counts) > MAX_VALUES:
        raise RequestRefused(413, f"expected at most {MAX_VALUES} values in a body, got more; send smaller ones")
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise RequestRefused(400, f"expected JSON, got {error}; send JSON") from error
    except RecursionError:
        raise _too_deep() from None
    if counts[2] + counts[3] > MAX_DEPTH:
        check_depth(value)
    return value


def check_depth(value: object) -> None:
    """Raise `RequestRefused` for JSON that is nested too deeply."""
    front, depth = [value], 0
    while front:
        if depth > MAX_DEPTH:
            raise _too_deep()
        depth += 1
        front = [inner for item in front for inner in (item.values() if is_object(item) else sequence(item))]


def _too_deep() -> RequestRefused:
    return RequestRefused(400, f"expected JSON at most {MAX_DEPTH} levels deep, got more")
