"""Who may read and write: tokens, sessions, hosts, origins, bodies, and security headers."""

import hmac
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from importlib.metadata import version
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cua_rl.host.request_limits import (
    BodyBudget,
    HeldBody,
    RequestRefused,
    host_name,
    parse_body,
    read_body,
    require_json,
)
from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.schemas import Session, SignIn

_SESSION_S = 7 * 24 * 3600
_MAX_SESSIONS = 1000
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_BODY_LIMIT_BYTES = 64 * 2**10
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_bearer = HTTPBearer(auto_error=False, description="the monitor's write or read token, or a project's token")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Tokens are compared in constant time and never shown again."""

    write_token: str = field(repr=False)
    read_token: str | None = field(default=None, repr=False)
    """None lets every client read; only for loopback."""
    hosts: Sequence[str] = LOOPBACK_HOSTS
    """Allowed Host headers; without a read token, others are refused (DNS rebinding)."""
    is_https: bool = False
    """Browsers reach the monitor through a proxy that speaks TLS; its cookies are for such connections only."""

    def may_read(self, token: str | None) -> bool:
        return self.read_token is None or self.may_write(token) or _same(token, self.read_token)

    def may_write(self, token: str | None) -> bool:
        return _same(token, self.write_token)


def make_token() -> str:
    """A new secret of 256 bits."""
    return secrets.token_urlsafe(32)


class Sessions:
    """Who has signed in: ids by their hashes, each with the token that it stands for. They end with the process."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, tuple[str, float]] = {}

    def open(self, token: str) -> str:
        """A new session; returns its id. Of too many, the oldest ends."""
        while len(self._tokens) >= _MAX_SESSIONS:
            del self._tokens[next(iter(self._tokens))]
        session_id = make_token()
        self._tokens[_hash(session_id)] = token, time.monotonic() + _SESSION_S
        return session_id

    def token(self, session_id: str) -> str | None:
        """The token with which a session was opened, None once it has ended."""
        token, ends_at = self._tokens.get(_hash(session_id), ("", 0.0))
        return token if time.monotonic() < ends_at else None

    def close(self, session_id: str) -> None:
        self._tokens.pop(_hash(session_id), None)


def _hash(session_id: str) -> bytes:
    return sha256(session_id.encode("utf-8", "replace")).digest()


def _same(token: str | None, expected: str) -> bool:
    return token is not None and hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())


async def rules_of(request: Request) -> AccessRules:
    return request.app.state.rules


def _sessions_of(request: Request) -> Sessions:
    return request.app.state.sessions


Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


async def given_token(request: Request, bearer: Bearer) -> str | None:
    """The token of the Authorization header, or that with which the session of the cookie was opened."""
    if bearer is not None:
        return bearer.credentials
    session_id = _session_id(request)
    return None if session_id is None else _sessions_of(request).token(session_id)


def _session_id(request: Request) -> str | None:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(_cookie_name(request))
    except CookieError:
        return None
    return None if morsel is None else morsel.value


def _cookie_name(request: Request) -> str:
    """Cookies are shared by all ports of a host, so the port is in the name; `__Host-` keeps it to https."""
    server: Any = request.scope.get("server") or ("", None)
    return f"{'__Host-' if _is_https(request) else ''}cua_rl_monitor_{server[1]}"


def _is_https(request: Request) -> bool:
    rules: AccessRules = request.app.state.rules
    return rules.is_https or request.url.scheme == "https"


GivenToken = Annotated[str | None, Depends(given_token)]


async def require_read(request: Request, token: GivenToken) -> None:
    """Require permission to read; 401 otherwise."""
    if not (await rules_of(request)).may_read(token):
        raise unauthorized("expected the monitor's read token, got none or another one; sign in with it")


async def require_write(request: Request, token: GivenToken, bearer: Bearer) -> None:
    """Require permission to write; a cookie is accepted only from our own origin."""
    if not (await rules_of(request)).may_write(token):
        raise unauthorized("expected the monitor's write token, got none or another one; it was printed at its start")
    if bearer is None and not _is_same_origin(request):
        raise HTTPException(403, "expected a request from the monitor's own pages, got one from elsewhere")


def _is_same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    if origin is None:
        return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    try:
        return urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:
        return False


def unauthorized(message: str) -> HTTPException:
    """The answer to a request without a token that it needs."""
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


CanRead = Depends(require_read)
CanWrite = Depends(require_write)


Rules = Annotated[AccessRules, Depends(rules_of)]


class _BoundedRequest(Request):
    """Reads its body within limits, and parses it off the event loop."""

    def __init__(self, request: Request, held: HeldBody) -> None:
        super().__init__(request.scope, request.receive)
        self._held = held
        self._read: bytes | None = None

    async def body(self) -> bytes:
        if self._read is None:
            try:
                require_json(self)
                self._read = await read_body(self, self._held)
            except RequestRefused as refused:
                raise HTTPException(refused.status, refused.message) from None
        return self._read

    async def json(self) -> Any:
        try:
            return await parse_body(await self.body())
        except RequestRefused as refused:
            if isinstance(refused.__cause__, json.JSONDecodeError):
                raise refused.__cause__ from None  # the framework says where
            raise HTTPException(refused.status, refused.message) from None


class BodyRoute(APIRoute):
    """Admits a request by its head before its body is read; the framework would ask for tokens afterwards."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler, behind `admit` if the route takes a body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def admitted(request: Request) -> Response:
            with (await self.admit(request)).hold() as held:
                return await handle(_BoundedRequest(request, held))

        return admitted

    async def admit(self, request: Request) -> BodyBudget:
        """How much the body may hold; raises `HTTPException`."""
        del request
        return BodyBudget(_BODY_LIMIT_BYTES)


class ReadRoute(BodyRoute):
    """A route for those who may read, and ask with a body."""

    async def admit(self, request: Request) -> BodyBudget:
        await require_read(request, await given_token(request, await _bearer(request)))
        return await super().admit(request)


class WriteRoute(BodyRoute):
    """A route for those who may write."""

    async def admit(self, request: Request) -> BodyBudget:
        bearer = await _bearer(request)
        await require_write(request, await given_token(request, bearer), bearer)
        return await super().admit(request)


router = APIRouter(prefix="/api/session", tags=["session"], responses=REFUSALS, route_class=BodyRoute)


@router.get("")
async def get_session(rules: Rules, token: GivenToken) -> Session:
    """Permissions of the client; requires no token."""
    return Session(
        can_read=rules.may_read(token),
        can_write=rules.may_write(token),
        must_sign_in=not rules.may_read(None),
        version=version("cua_rl"),
    )


@router.post("")
async def sign_in(rules: Rules, sign_in: SignIn, request: Request, response: Response) -> Session:
    """Open a session for a read or write token, in a cookie that scripts cannot read."""
    if not (rules.may_write(sign_in.token) or (rules.read_token and rules.may_read(sign_in.token))):
        raise HTTPException(401, "expected the monitor's read or write token, got another one; it prints them at start")
    response.set_cookie(
        _cookie_name(request),
        _sessions_of(request).open(sign_in.token),
        max_age=_SESSION_S,
        httponly=True,
        samesite="strict",
        secure=_is_https(request),
    )
    return await get_session(rules, sign_in.token)


@router.delete("")
async def sign_out(rules: Rules, request: Request, response: Response) -> Session:
    """End the session and delete its cookie."""
    _sessions_of(request).close(_session_id(request) or "")
    response.delete_cookie(_cookie_name(request), secure=_is_https(request), httponly=True, samesite="strict")
    return await get_session(rules, None)


class Guard:
    """ASGI middleware: refuses foreign hosts, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                outgoing = MutableHeaders(scope=message)
                caching = {"Cache-Control": "no-store"} if str(scope["path"]).startswith("/api/") else {}
                for name, value in (_HEADERS | caching).items():
                    outgoing.setdefault(name, value)
            await send(message)

        answer = self._refusal(Headers(scope=scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        if self._rules.read_token is None and host_name(headers.get("host", "")) not in self._rules.hosts:
            return PlainTextResponse("expected one of the monitor's own host names; use the address it printed", 421)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 15:
            return PlainTextResponse("expected a number in Content-Length", 400)
        return None
