"""The Training Monitor's API over the database in an evaluation's folder."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.security import AccessRules
from cua_rl.run_folder.recorded_run import open_run_database


@asynccontextmanager
async def open_monitor(folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a monitor that shows the folder."""
    async with open_run_database(str(folder), {}) as (database, _):
        rules = AccessRules(write_token="write-token-of-the-tests")
        app = guard(make_app(Databases([database]), rules), rules)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            yield client


async def get(client: httpx.AsyncClient, path: str, **params: str | int) -> Any:
    answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def fetch_runs(client: httpx.AsyncClient) -> dict[str, Any]:
    """The runs of the folder's models, by name."""
    return {run["run_name"]: run for run in (await get(client, "/api/runs"))["items"]}


async def fetch_rollouts(client: httpx.AsyncClient, run_id: str) -> list[Any]:
    """All rollouts of a model, in the order in which they began."""
    page = await get(client, f"/api/runs/{run_id}/rollouts", limit=200)
    assert page["next_cursor"] is None
    return page["items"][::-1]
