"""Lists of many runs: which stand first, how a list goes on, and what was set in each."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, RunFolder
from cua_rl.monitor.security import AccessRules
from tests.real.database.conftest import run_sql
from tests.real.monitor.conftest import Monitor

pytestmark = pytest.mark.asyncio


def _add_runs(url: str, *configs: dict[str, Any]) -> None:
    """Runs 0, 1, … with ids from 1, of which each began an hour before the one before it."""
    for number, config in enumerate(configs):
        run_sql(
            url,
            "INSERT INTO trainings (run_name, log_path, config, image_token_id, attempt_id, num_attempts, status,"
            " first_step, num_completed_steps, total_steps, started_at, heartbeat_at, updated_at) SELECT"
            f" 'run {number}', '/r', '{json.dumps(config)}', 1, gen_random_uuid(), 1, 'completed', 1, 0, 4, at, at, at"
            f" FROM (SELECT now() - interval '{number} hours' AS at)",
        )


async def test_a_pinned_run_is_first_on_the_first_page_and_its_alias_finds_it(monitor: Monitor) -> None:
    _add_runs(monitor.url, {}, {}, {}, {}, {})
    for run, body in ((4, {"is_pinned": True}), (5, {"is_pinned": True, "alias": "100 % better"})):
        assert (await monitor.client.put(f"/api/runs/{run}/mark", json=body)).json() == {"alias": None} | body

    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = await monitor.json("/api/runs", limit=2, **cursor)
        names += [one["run_name"] for one in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert names == ["run 3", "run 4", "run 0", "run 1", "run 2"]
    (found,) = (await monitor.json("/api/runs", search="100 %"))["items"]
    assert (found["run_name"], found["alias"]) == ("run 4", "100 % better")

    for body in ({"alias": ""}, {"alias": " a"}, {"alias": "a" * 121}, {"colour": "red"}):
        assert (await monitor.client.put("/api/runs/1/mark", json=body)).status_code == 422
    assert (await monitor.stranger.put("/api/runs/1/mark", json={})).status_code == 401
    assert (await monitor.client.put("/api/runs/5/mark", json={})).json() == {"alias": None, "is_pinned": False}
    assert (await monitor.json("/api/runs", limit=1))["items"][0]["run_name"] == "run 3"


async def test_settings_in_which_runs_differ_are_beside_each_other_without_those_they_share(monitor: Monitor) -> None:
    shared = {"group_size": 8, "base_url": "https://me:hunter2@models.example"}
    _add_runs(
        monitor.url,
        shared | {"lora": {"rank": 8}, "learning_rate": 1e-3, "api_key": "sk-one-secret-key"},
        shared | {"lora": {"rank": 32}, "learning_rate": 1e-3, "api_key": "sk-another-secret-key"},
        shared | {"lora": {"rank": 32}, "learning_rate": 1e-4},
    )
    found = await monitor.json("/api/runs/settings")
    assert [one["run_name"] for one in found["runs"]] == ["run 0", "run 1", "run 2"]
    values = {row["key"]: row["values"] for row in found["config"]}
    assert values.pop("lora.rank") == [8, 32, 32]
    assert values.pop("learning_rate") == [1e-3, 1e-3, 1e-4]
    assert values.pop("api_key")[2] is None
    assert values == {}
    assert "secret-key" not in json.dumps(found)
    found = await monitor.json("/api/runs/settings", limit=2)
    assert {row["key"] for row in found["config"]} == {"lora.rank"}


async def test_settings_of_runs_whose_databases_are_closed_come_from_their_folders(tmp_path: Path) -> None:
    databases = Databases([])
    for rank, config in ((8, '{"rank": 8, "api_key": "sk-one-secret-key"}'), (16, '{"rank": 16}'), (0, "[broken")):
        folder = tmp_path / f"rank-{rank}"
        (folder / "postgres").mkdir(parents=True)
        (folder / "postgres" / "PG_VERSION").touch()
        (folder / "config.json").write_text(config)
        databases.folders[folder.name] = RunFolder(key=folder.name, path=folder)
    rules = AccessRules(write_token="w")
    transport = httpx.ASGITransport(app=guard(make_app(databases, rules), rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = (await client.get("/api/runs/settings")).json()
    names = [one["run_name"] for one in found["runs"]]
    rows = {row["key"]: dict(zip(names, row["values"], strict=True)) for row in found["config"]}
    assert rows["rank"] == {"rank-8": 8, "rank-16": 16, "rank-0": None}
    assert "secret-key" not in json.dumps(found)
    assert databases.all == ()
