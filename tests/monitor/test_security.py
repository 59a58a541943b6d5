"""Who may read and write, and what is refused before any database is asked."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from starlette.types import ASGIApp

from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.live import LiveFeed
from cua_rl.monitor.security import LOOPBACK_HOSTS, AccessRules, Sessions

READ, WRITE = "a-read-token-for-tests", "a-write-token-for-tests"
OPEN = ("/api/session",)
"""What may be asked without a token: whether one is needed, and signing in with one."""
ASKED = ("/api/runs/run_id/sql",)
"""What has a body and only reads, as tests/real/monitor/test_sql_queries.py shows."""


def rules(read_token: str | None, hosts: Sequence[str] = LOOPBACK_HOSTS) -> AccessRules:
    return AccessRules(write_token=WRITE, read_token=read_token, hosts=hosts)


@asynccontextmanager
async def asking(access: AccessRules, static: Path | None = None, **settings: Any) -> AsyncGenerator[httpx.AsyncClient]:
    app = make_app(Databases([]), access) if static is None else make_app(Databases([]), access, static=static)
    transport = httpx.ASGITransport(app=guard(app, access), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", **settings) as client:
        yield client


def operations(schema: Any) -> list[tuple[str, str]]:
    """Every method and address of the API but ingest, whose tokens are in the database, with all parameters given."""
    return [
        (method, path.replace("{phase}", "step").replace("{sha256}", "0" * 64).replace("{", "").replace("}", ""))
        for path, methods in schema["paths"].items()
        for method in methods
        if path != "/api/ingest/batch"
    ]


async def test_where_reading_needs_a_token_no_route_of_the_api_answers_without_it() -> None:
    async with asking(rules(READ)) as client:
        schema = (await client.get("/api/openapi.json")).json()
        asked = [(method, path) for method, path in operations(schema) if path not in OPEN]
        answers = {(method, path): await client.request(method, path) for method, path in asked}

    assert len(asked) > 15
    assert {name: answer.status_code for name, answer in answers.items() if answer.status_code != 401} == {}


async def test_no_route_writes_without_the_write_token() -> None:
    async with asking(rules(READ), headers={"Authorization": f"Bearer {READ}"}) as client:
        schema = (await client.get("/api/openapi.json")).json()
        writes = [one for one in operations(schema) if one[0] != "get" and one[1] not in (*OPEN, *ASKED)]
        answers = [await client.request(*one, json={"success": True, "reason": "r", "actor": "a"}) for one in writes]

    assert len(writes) == 4  # verdicts, notes, pins and aliases
    assert {answer.status_code for answer in answers} == {401}


async def test_a_cookie_writes_only_for_pages_of_our_own() -> None:
    path = "/api/runs/1/rollouts/r/overrides"
    async with asking(rules(None)) as client:
        assert (await client.post("/api/session", json={"token": "not-the-token"})).status_code == 401
        signed_in = await client.post("/api/session", json={"token": WRITE})
        assert "HttpOnly" in signed_in.headers["set-cookie"]
        assert "SameSite=strict" in signed_in.headers["set-cookie"]
        assert "Secure" not in signed_in.headers["set-cookie"]
        assert WRITE not in signed_in.headers["set-cookie"]
        body = {"success": True, "reason": "r", "actor": "a"}
        foreign = await client.post(path, json=body, headers={"Origin": "https://elsewhere.example"})
        framed = await client.post(path, json=body, headers={"Sec-Fetch-Site": "cross-site"})
        ours = await client.post(path, json=body, headers={"Origin": "http://localhost"})

    assert (foreign.status_code, framed.status_code) == (403, 403)
    assert ours.status_code == 404  # let through: there is no such run


async def test_without_a_read_token_only_our_own_host_names_are_answered() -> None:
    async with asking(rules(None)) as client:
        for host, status in {"localhost:8720": 404, "127.0.0.1": 404, "[::1]:1": 404, "rebound.example": 421}.items():
            assert (await client.get("/api/runs/1", headers={"Host": host})).status_code == status, host
    async with asking(rules(READ), headers={"Authorization": f"Bearer {READ}"}) as client:
        assert (await client.get("/api/runs/1", headers={"Host": "monitor.example"})).status_code == 404


async def test_a_session_is_no_token_has_a_cookie_of_its_port_and_ends() -> None:
    async with asking(rules(READ)) as client:
        assert (await client.get("/api/runs/1")).status_code == 401
        signed_in = await client.post("/api/session", json={"token": READ})
        ((name, session_id),) = client.cookies.items()
        assert name == "cua_rl_monitor_None"  # without a socket there is no port
        assert (await client.get("/api/runs/1")).status_code == 404
        assert (await client.post("/api/runs/1/rollouts/r/overrides", json={})).status_code == 401
        as_bearer = await client.get("/api/runs/1", headers={"Authorization": f"Bearer {session_id}"})
        await client.delete("/api/session")
        client.cookies.set(name, session_id)
        replayed = await client.get("/api/runs/1")
        client.cookies.clear()
        client.cookies.set(name, READ)
        raw_token = await client.get("/api/runs/1")

    assert "expires" in signed_in.headers["set-cookie"].lower() or "Max-Age=" in signed_in.headers["set-cookie"]
    assert (as_bearer.status_code, replayed.status_code, raw_token.status_code) == (401, 401, 401)


async def test_behind_a_proxy_with_tls_the_cookie_is_for_this_host_and_https_only() -> None:
    access = AccessRules(write_token=WRITE, read_token=READ, is_https=True)
    async with asking(access) as client:
        signed_in = await client.post("/api/session", json={"token": READ})
        signed_out = await client.delete("/api/session")
    async with asking(rules(READ)) as client:
        claimed = await client.post("/api/session", json={"token": READ}, headers={"X-Forwarded-Proto": "https"})

    for answer in (signed_in, signed_out):
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-cua_rl_monitor_")
        assert "Secure" in cookie
        assert "Path=/" in cookie
        assert "Domain" not in cookie
    assert "Secure" not in claimed.headers["set-cookie"]


def test_sessions_are_kept_by_their_hashes_and_the_oldest_ends_when_there_are_too_many() -> None:
    sessions = Sessions()
    ids = [sessions.open(READ) for _ in range(1001)]
    assert len(set(ids)) == 1001
    assert (sessions.token(ids[0]), sessions.token(ids[1]), sessions.token(ids[-1])) == (None, READ, READ)
    assert ids[-1] not in repr(vars(sessions))


@pytest.mark.parametrize(
    ("path", "headers", "statuses"),
    [
        ("/api/session", {}, (413, 413, 400)),
        ("/api/ingest/batch", {}, (401, 401, 400)),  # asked for its token before anything is read
        ("/api/runs/1/rollouts/r/overrides", {}, (401, 401, 400)),
        ("/api/runs/1/rollouts/r/overrides", {"Authorization": f"Bearer {WRITE}"}, (413, 413, 400)),
    ],
)
async def test_a_body_that_is_too_large_is_refused_whether_its_length_is_told_or_not(
    path: str, headers: dict[str, str], statuses: tuple[int, int, int]
) -> None:
    read = 0

    async def chunks() -> AsyncGenerator[bytes]:
        nonlocal read
        for _ in range(66):
            yield b" " * 2**10
            read += 2**10

    sent = headers | {"Content-Type": "application/json"}
    async with asking(rules(None)) as client:
        told = await client.post(path, content=b"{}", headers=sent | {"Content-Length": str(2**16 + 1)})
        untold = await client.post(path, content=chunks(), headers=sent)
        lied = await client.post(path, content=b"{}", headers=sent | {"Content-Length": "many"})

    assert (told.status_code, untold.status_code, lied.status_code) == statuses
    assert read == (2**16 if statuses[1] == 413 else 0)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"token":' + b"[" * 20_000, {}, 400),
        (b'{"token":' * 100 + b"1" + b"}" * 100, {}, 400),
        (b'{"token":', {}, 422),
        (b'{"token": "x"}', {"Content-Type": "text/plain"}, 415),
        (b'{"token": "x"}', {"Content-Encoding": "gzip"}, 415),
    ],
)
async def test_a_body_that_is_no_plain_json_of_some_depth_is_refused(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    async with asking(rules(None)) as client:
        answer = await client.post("/api/session", content=body, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status


OUTSIDE = (
    *("/../secret.json", "/assets/../../secret.json", "/%2e%2e/secret.json", "/..%5csecret.json", "//secret.json"),
    *("/assets/%2e%2e%2f%2e%2e%2fsecret.json", "/link.json", "/{secret}", "/%00.json", "/" + "a" * 5000 + ".json"),
)


async def test_nothing_outside_of_the_web_app_is_served(tmp_path: Path) -> None:
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<h1>app</h1>")
    secret = tmp_path / "secret.json"
    secret.write_text("a secret")
    (tmp_path / "static" / "link.json").symlink_to(secret)
    access = rules(None)
    app = guard(make_app(Databases([]), access, static=tmp_path / "static"), access)

    for path in OUTSIDE:
        status, body = await _get(app, path.replace("{secret}", str(secret).lstrip("/")))
        assert (status, b"a secret" in body) == (404, False), path


async def _get(app: ASGIApp, path: str) -> tuple[int, bytes]:
    """Ask for a path as it is: clients tidy it up."""
    scope = {
        **{"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "query_string": b""},
        **{"headers": [(b"host", b"localhost")], "server": ("localhost", 80), "client": ("127.0.0.1", 1)},
        **{"path": unquote(path), "raw_path": path.encode()},
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def test_pages_forbid_scripts_and_frames_of_others() -> None:
    async with asking(rules(None)) as client:
        page, answer = await client.get("/runs/1"), await client.get("/api/session")

    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert WRITE not in page.text + answer.text


async def test_an_address_follows_only_so_many_event_streams() -> None:
    feed = LiveFeed()
    streams = [feed.follow(None, None, "10.0.0.1") for _ in range(128)]
    for stream in streams:
        await anext(stream)
    assert (feed.has_room("10.0.0.1"), feed.has_room("10.0.0.2")) == (False, True)
    await streams[0].aclose()
    assert feed.has_room("10.0.0.1")
    for stream in streams:
        await stream.aclose()
