"""Monitors over a real Postgres: one for each test that sends, without a socket; one on a port for all that read."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest_asyncio
import uvicorn

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import make_writer_engine
from cua_rl.events import EvaluationEnded, RolloutSource
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.prices import Prices
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.security import AccessRules
from tests.patience import patience
from tests.real.database.conftest import TEMPLATE, run_sql, server_url, url, with_database
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start
from tests.real.monitor.events import make_step_events

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


@asynccontextmanager
async def serving(url: str, port: int = 0, prices: Prices | None = None) -> AsyncGenerator[int]:
    """A monitor on a real port."""
    rules = AccessRules(write_token=WRITE_TOKEN)
    app = make_app(Databases([open_database(url)]), rules, prices=prices)
    server = uvicorn.Server(
        uvicorn.Config(guard(app, rules), port=port, log_level="warning", timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A monitor on a port, over a run with a baseline and two steps that goes on."""

    url: str
    client: httpx.AsyncClient
    project_token: str

    async def json(self, path: str, **params: object) -> Any:
        answer = await self.client.get(path, params=params)  # pyright: ignore[reportArgumentType]
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shown(server_url: str) -> AsyncGenerator[Shown]:
    run_sql(server_url, f"CREATE DATABASE shown TEMPLATE {TEMPLATE}")
    url = with_database(server_url, "shown")
    engine = make_writer_engine(url)
    _, token = create_project(engine, "tests")
    engine.dispose()
    headers = {"Authorization": f"Bearer {WRITE_TOKEN}"}
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        baseline = source_events(make_group(seed=9, group_id="before"), 0, "baseline")
        ended = EvaluationEnded(source=RolloutSource(phase="baseline", step=0), metrics={})
        for event in [start(), *baseline, ended, *make_step_events(1), *make_step_events(2)]:
            await recorder.record(event)
        await recorder.flush()
        async with (
            serving(url) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=patience(30)
            ) as client,
        ):
            yield Shown(url=url, client=client, project_token=token)
