"""Runs with a database of their own are shown from their folders, and given back when they go on."""

import asyncio
import fcntl
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, RunFolder
from cua_rl.monitor.live import LiveFeed
from cua_rl.monitor.run_folders import RUN_LOCK, find_runs, show_folder, show_runs_below
from cua_rl.monitor.security import AccessRules
from cua_rl.reporting.json_lines import write_records
from cua_rl.types.errors import ConfigError
from tests.patience import patience
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.events import make_step_events

_MARK = {"alias": "the good one", "is_pinned": True}


async def test_a_run_of_a_folder_is_shown_and_its_database_given_back_when_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    (folder / "logs").mkdir(parents=True)
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as postgres:
        await migrate(postgres.url)
        async with DatabaseRecorder(postgres.url, image_token_id=IMAGE_TOKEN) as recorder:
            for event in [start(), *make_step_events(1)]:
                await recorder.record(event)
    (folder / "config.json").write_text('{"max_steps": 4, "model_name": "Qwen3-VL-4B"}')
    records = (
        {"step": 0, "eval/held_out/success_rate": 0.5, "eval/held_out/success_rate_low": 0.3},
        {"step": 1, "reward/success_rate": 0.25, "reward/mean": 0.25},
    )
    write_records(folder / "metrics.jsonl", records)
    databases, feed, rules = Databases([]), LiveFeed(), AccessRules(write_token="w")
    transport = httpx.ASGITransport(app=guard(make_app(databases, rules, feed=feed), rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        showing = asyncio.create_task(show_runs_below(databases, feed, tmp_path))
        (run,) = await _wait_for_runs(client, 1)
        # from its files; nobody has opened it, so its database does not run
        assert (run["run_id"], run["success_rate"], run["log_path"]) == ("my-run.0", 0.25, str(folder))
        assert (run["num_completed_steps"], run["total_steps"], run["model_name"]) == (1, 4, "Qwen3-VL-4B")
        assert (run["baseline"]["rate"], run["baseline"]["low"]) == (0.5, 0.3)
        assert running_postgres_url(folder / "postgres") is None
        assert databases.all == ()
        opened = (await client.get("/api/runs/my-run.0")).json()
        # where it lies now, not where it was recorded
        assert (opened["run_id"], opened["log_path"]) == ("my-run.1", str(folder))
        (run,) = await _wait_for_runs(client, 1)
        assert run["run_id"] == "my-run.1"
        rollouts = (await client.get("/api/runs/my-run.1/rollouts")).json()["items"]
        assert len(rollouts) == 4
        await client.put("/api/runs/my-run.1/mark", json=_MARK, headers={"Authorization": "Bearer w"})
        refused = await client.post("/api/ingest/batch", json={}, headers={"Authorization": "Bearer x"})
        assert refused.status_code == 404  # nobody can send into a folder

        with (folder / RUN_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a run does that goes on
            async with asyncio.timeout(patience(30)):
                while running_postgres_url(folder / "postgres") is not None:
                    await asyncio.sleep(0.05)
            async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log"):
                await _wait_for(client, "my-run.1")
            found = await _wait_for(client, "my-run.0")
        assert found | _MARK == found  # also without its database
        showing.cancel()
        await asyncio.wait([showing])
    assert databases.all == ()


async def _wait_for_runs(client: httpx.AsyncClient, count: int) -> list[Any]:
    async with asyncio.timeout(patience(60)):
        while True:
            answer = await client.get("/api/runs")
            if answer.status_code == 200 and len(answer.json()["items"]) == count:
                return answer.json()["items"]
            await asyncio.sleep(0.05)


async def _wait_for(client: httpx.AsyncClient, run_id: str) -> Any:
    """The only run, once it has this id."""
    async with asyncio.timeout(patience(30)):
        while (run := (await _wait_for_runs(client, 1))[0])["run_id"] != run_id:
            await asyncio.sleep(0.05)
    return run


def test_all_runs_below_a_folder_are_found_nested_ones_too(tmp_path: Path) -> None:
    names = [*(f"run-{number}" for number in range(12)), "sweep/a/run-1", "sweep/b/run-1"]
    for name in names:
        (tmp_path / name / "postgres").mkdir(parents=True)
        (tmp_path / name / "postgres" / "PG_VERSION").touch()

    assert sorted(str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)) == sorted(names)


async def test_a_run_whose_folder_is_deleted_leaves_the_list_and_does_not_come_back(tmp_path: Path) -> None:
    for name in ("kept", "deleted"):
        (tmp_path / name / "postgres").mkdir(parents=True)
        (tmp_path / name / "postgres" / "PG_VERSION").touch()
    databases, feed, rules = Databases([]), LiveFeed(), AccessRules(write_token="w")
    transport = httpx.ASGITransport(app=guard(make_app(databases, rules, feed=feed), rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        showing = asyncio.create_task(show_runs_below(databases, feed, tmp_path))
        await _wait_for_runs(client, 2)
        shown = databases.folders["deleted"]
        shutil.rmtree(tmp_path / "deleted")
        answer = await client.get("/api/runs")
        assert [run["run_name"] for run in answer.json()["items"]] == ["kept"]
        shown.wanted.set()  # as by a page on the run that is still open
        async with asyncio.timeout(patience(30)):
            while "deleted" in databases.folders:
                await asyncio.sleep(0.05)
        assert (await client.get("/api/runs/deleted.0")).status_code == 404
        assert not (tmp_path / "deleted").exists()
        assert not showing.done()
        showing.cancel()
        await asyncio.wait([showing])


async def test_a_folder_that_cannot_be_opened_ends_no_monitor_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "theirs"
    (folder / "postgres").mkdir(parents=True)
    (folder / "postgres" / "PG_VERSION").write_text("9\n")
    databases, feed = Databases([]), LiveFeed()
    shown = RunFolder(key="theirs", path=folder)
    shown.wanted.set()

    showing = asyncio.create_task(show_folder(databases, feed, shown))
    async with asyncio.timeout(patience(30)):
        while "cannot show" not in caplog.text and not showing.done():
            await asyncio.sleep(0.01)
    assert not showing.done()
    showing.cancel()
    with pytest.raises(ConfigError, match="expected Postgres 9"):
        await show_folder(databases, feed, replace(shown, key=""))
