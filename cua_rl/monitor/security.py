"""Who may read and write: tokens, signing in, hosts, origins, body sizes, and security headers."""

import hmac
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from importlib.metadata import version
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, HTTPException, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.schemas import Session, SignIn

router = APIRouter(prefix="/api/session", tags=["session"], responses=REFUSALS)

COOKIE = "cua_rl_monitor"
_COOKIE_AGE_S = 30 * 24 * 3600
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_INGEST_LIMIT_BYTES = 64 * 2**20
_BODY_LIMIT_BYTES = 256 * 2**10
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

    def may_read(self, token: str | None) -> bool:
        return self.read_token is None or self.may_write(token) or _same(token, self.read_token)

    def may_write(self, token: str | None) -> bool:
        return _same(token, self.write_token)


def make_token() -> str:
    """A new secret of 256 bits."""
    return secrets.token_urlsafe(32)


def _same(token: str | None, expected: str) -> bool:
    return token is not None and hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())


def rules_of(request: Request) -> AccessRules:
    return request.app.state.rules


Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


def given_token(request: Request, bearer: Bearer) -> str | None:
    """The token of the Authorization header, or of the cookie that signing in has set."""
    if bearer is not None:
        return bearer.credentials
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None else morsel.value


GivenToken = Annotated[str | None, Depends(given_token)]


def require_read(request: Request, token: GivenToken) -> None:
    """Require permission to read; 401 otherwise."""
    if not rules_of(request).may_read(token):
        raise _unauthorized("expected the monitor's read token, got none or another one; sign in with it")


def require_write(request: Request, token: GivenToken, bearer: Bearer) -> None:
    """Require permission to write; a cookie is accepted only from our own origin."""
    if not rules_of(request).may_write(token):
        raise _unauthorized("expected the monitor's write token, got none or another one; it was printed at its start")
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


def _unauthorized(message: str) -> HTTPException:
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


CanRead = Depends(require_read)
CanWrite = Depends(require_write)


Rules = Annotated[AccessRules, Depends(rules_of)]


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
    """Store a read or write token in a cookie that scripts cannot read."""
    if not (rules.may_write(sign_in.token) or (rules.read_token and rules.may_read(sign_in.token))):
        raise HTTPException(401, "expected the monitor's read or write token, got another one; it prints them at start")
    response.set_cookie(
        COOKIE,
        sign_in.token,
        max_age=_COOKIE_AGE_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return await get_session(rules, sign_in.token)


@router.delete("")
async def sign_out(rules: Rules, response: Response) -> Session:
    """Delete the cookie."""
    response.delete_cookie(COOKIE)
    return await get_session(rules, None)


class _TooLarge(Exception):
    """The body exceeds the limit of its route; without this error, the framework would answer 400."""


class Guard:
    """ASGI middleware: refuses foreign hosts and large bodies, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), str(scope["path"])
        limit = _INGEST_LIMIT_BYTES if path.endswith("/api/ingest/batch") else _BODY_LIMIT_BYTES
        has_started = is_too_large = False
        num_received = 0

        async def send_guarded(message: Message) -> None:
            nonlocal has_started
            if is_too_large and not has_started:
                return  # what the application makes of it
            if message["type"] == "http.response.start":
                has_started = True
                outgoing = MutableHeaders(scope=message)
                caching = {"Cache-Control": "no-store"} if path.startswith("/api/") else {}
                for name, value in (_HEADERS | caching).items():
                    outgoing.setdefault(name, value)
            await send(message)

        async def receive_limited() -> Message:
            nonlocal is_too_large, num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > limit:
                is_too_large = True
                raise _TooLarge
            return message

        refusal = self._refusal(headers, limit)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        with suppress(_TooLarge):
            await self._app(scope, receive_limited, send_guarded)
        if is_too_large and not has_started:
            is_too_large = False
            await _too_large(limit)(scope, receive, send_guarded)

    def _refusal(self, headers: Headers, limit: int) -> PlainTextResponse | None:
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            host = ""
        if self._rules.read_token is None and host not in self._rules.hosts:
            return PlainTextResponse("expected one of the monitor's own host names; use the address it printed", 421)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 15:
            return PlainTextResponse("expected a number in Content-Length", 400)
        return _too_large(limit) if int(length) > limit else None


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"expected a body of at most {limit} bytes; send smaller batches", 413)
