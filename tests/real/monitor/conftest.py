"""A monitor over a real Postgres, asked without a socket."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest_asyncio

from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.security import AccessRules
from tests.real.database.conftest import server_url, url

__all__ = ["server_url", "url"]

WRITE_TOKEN = "a-write-token-for-tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A running monitor; `client` may write, `project` may ingest."""

    url: str
    client: httpx.AsyncClient
    stranger: httpx.AsyncClient
    project: httpx.AsyncClient
    project_token: str

    async def get(self, path: str, **params: object) -> httpx.Response:
        return await self.client.get(path, params=params)  # pyright: ignore[reportArgumentType]

    async def json(self, path: str, **params: object) -> Any:
        answer = await self.get(path, **params)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture
async def monitor(url: str) -> AsyncGenerator[Monitor]:
    engine = make_writer_engine(url)
    _, token = create_project(engine, "tests")
    engine.dispose()
    rules = AccessRules(write_token=WRITE_TOKEN)
    app = make_app(Databases([open_database(url)]), rules)
    transport = httpx.ASGITransport(app=guard(app, rules), raise_app_exceptions=False)

    def client(token: str | None) -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async with client(WRITE_TOKEN) as writer, client(None) as stranger, client(token) as project:
        async with app.router.lifespan_context(app):
            yield Monitor(url=url, client=writer, stranger=stranger, project=project, project_token=token)
