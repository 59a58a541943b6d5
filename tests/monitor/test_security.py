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
from cua_rl.monitor.security import LOOPBACK_HOSTS, AccessRules

READ, WRITE = "a-read-token-for-tests", "a-write-token-for-tests"
OPEN = ("/api/session",)
"""What may be asked without a token: whether one is needed, and signing in with one."""


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
        writes = [one for one in operations(schema) if one[0] != "get" and one[1] not in OPEN]
        answers = [await client.request(*one, json={"success": True, "reason": "r", "actor": "a"}) for one in writes]

    assert len(writes) == 1
    assert {answer.status_code for answer in answers} == {401}


async def test_a_cookie_writes_only_for_pages_of_our_own() -> None:
    path = "/api/runs/1/rollouts/r/overrides"
    async with asking(rules(None)) as client:
        assert (await client.post("/api/session", json={"token": "not-the-token"})).status_code == 401
        signed_in = await client.post("/api/session", json={"token": WRITE})
        assert "HttpOnly" in signed_in.headers["set-cookie"]
        assert "SameSite=strict" in signed_in.headers["set-cookie"]
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


@pytest.mark.parametrize(("path", "limit"), [("/api/ingest/batch", 64 * 2**20), ("/api/session", 256 * 2**10)])
async def test_a_body_that_is_too_large_is_refused_whether_its_length_is_told_or_not(path: str, limit: int) -> None:

    async def chunks() -> AsyncGenerator[bytes]:
        for _ in range(limit // 2**18 + 2):
            yield b" " * 2**18

    async with asking(rules(None)) as client:
        told = await client.post(path, content=b"{}", headers={"Content-Length": str(limit + 1)})
        untold = await client.post(path, content=chunks(), headers={"Content-Type": "application/json"})
        lied = await client.post(path, content=b"{}", headers={"Content-Length": "many"})

    assert (told.status_code, untold.status_code, lied.status_code) == (413, 413, 400)


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
