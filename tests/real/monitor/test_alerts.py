"""Alerts of runs that go on, from what they recorded; a webhook is told of those that begin while somebody watches."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cua_rl.events import Event
from cua_rl.monitor.alert_watch import watching
from cua_rl.monitor.databases import Databases, RunFolder, open_database
from tests.patience import patience
from tests.real.database.conftest import run_sql
from tests.real.monitor.conftest import Monitor
from tests.real.monitor.test_run_figures import EASY, record, source_of, trained

pytestmark = pytest.mark.asyncio

CONSTANT = {"reward/constant_group_frac": 1.0, "policy/parity_mean_abs": 1e-6}


def _steps(number: int, metrics: dict[str, float]) -> list[Event]:
    steps = range(1, number + 1)
    return [
        one
        for step in steps
        for one in (*source_of("step", step, (EASY, (True,))), replace(trained(step), metrics=metrics))
    ]


async def _kinds(monitor: Monitor) -> list[str]:
    (run,) = (await monitor.json("/api/runs"))["items"]
    assert (await monitor.json("/api/runs/1"))["alerts"] == run["alerts"]
    return [alert["kind"] for alert in run["alerts"]]


async def test_the_latest_steps_of_a_run_that_goes_on_raise_alerts_until_it_ends(monitor: Monitor) -> None:
    await record(monitor, *_steps(5, CONSTANT))
    assert await _kinds(monitor) == ["constant_groups"]
    run_sql(monitor.url, """UPDATE steps SET metrics = '{"policy/parity_mean_abs": 0.5}' WHERE step = 5""")
    assert await _kinds(monitor) == ["parity"]
    run_sql(monitor.url, """UPDATE trainings SET config = '{"trainer": {"parity_limit": 2}}'""")
    assert await _kinds(monitor) == []
    run_sql(monitor.url, "UPDATE trainings SET config = '{}', status = 'completed'")
    assert await _kinds(monitor) == []


async def test_a_run_without_progress_is_stalled_and_one_without_heartbeat_is_gone(monitor: Monitor) -> None:
    await record(monitor, *_steps(2, {"reward/mean": 0.5}))
    assert await _kinds(monitor) == []
    run_sql(monitor.url, "UPDATE steps SET updated_at = now() - interval '25 minutes'")
    run_sql(monitor.url, "UPDATE trainings SET started_at = now() - interval '2 hours', heartbeat_at = now()")
    (alert,) = (await monitor.json("/api/runs/1"))["alerts"]
    assert (alert["kind"], "25 minutes" in alert["message"]) == ("stalled", True)
    run_sql(monitor.url, "UPDATE trainings SET heartbeat_at = now() - interval '12 minutes'")
    (alert,) = (await monitor.json("/api/runs/1"))["alerts"]
    assert (alert["kind"], "no heartbeat for 12 minutes" in alert["message"]) == ("stalled", True)


@asynccontextmanager
async def _webhook(*statuses: int) -> AsyncGenerator[tuple[str, asyncio.Queue[Any]]]:
    """A server that answers one request with each of these statuses, the last with all others; what it was sent."""
    got: asyncio.Queue[Any] = asyncio.Queue()
    left = list(statuses)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        status = left.pop(0) if len(left) > 1 else left[0]
        await got.put((status, json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 {status} so\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook/a-secret-path", got


def _set_metrics(monitor: Monitor, metrics: str) -> None:
    run_sql(monitor.url, f"UPDATE steps SET metrics = '{metrics}' WHERE step = 3")


PARITY = '{"policy/parity_mean_abs": 0.5}'


async def test_a_webhook_is_told_once_of_an_alert_that_begins_and_again_if_it_did_not_listen(
    monitor: Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    await record(monitor, *_steps(3, CONSTANT))  # what is so already is not told
    run_sql(monitor.url, "UPDATE trainings SET heartbeat_at = now() + interval '1 hour', alias = E'<!here>\\n& co'")
    databases = Databases([open_database(monitor.url)])
    with caplog.at_level(logging.INFO, logger="cua_rl.monitor.alert_watch"):  # httpx's lines name the address, masked
        async with (
            _webhook(500, 200) as (address, got),
            watching(databases, address, "http://monitor", every_s=0.1),
            asyncio.timeout(patience(20)),
        ):
            _set_metrics(monitor, PARITY)
            refused, taken = await got.get(), await got.get()
            assert (refused[0], taken[0], refused[1]) == (500, 200, taken[1])
            said = taken[1]
            assert (said["run_id"], said["run_name"], said["kind"]) == ("1", "run", "parity")
            assert said["url"] == "http://monitor/runs/1"
            assert said["text"].startswith("&lt;!here&gt; &amp; co: ")  # in which Slack calls nobody
            assert "0.5 nats" in said["text"]
            _set_metrics(monitor, "{}")
            while "alert over run=run kind=parity" not in caplog.text:
                await asyncio.sleep(0.02)
            _set_metrics(monitor, PARITY)
            assert (await got.get())[1]["kind"] == "parity"  # begun anew
            run_sql(monitor.url, "ALTER TABLE trainings RENAME TO away")
            while "does not answer (ProgrammingError)" not in caplog.text:
                await asyncio.sleep(0.02)
            run_sql(monitor.url, "ALTER TABLE away RENAME TO trainings")
            run_sql(monitor.url, "UPDATE trainings SET heartbeat_at = now() - interval '1 hour'")
            assert (await got.get())[1]["kind"] == "stalled"  # and nothing in between
    await databases.close()
    assert "status 500" in caplog.text
    assert "a-secret-path" not in caplog.text


async def test_a_webhook_is_told_of_an_alert_that_a_new_run_has_when_it_is_first_looked_at(monitor: Monitor) -> None:
    databases = Databases([open_database(monitor.url)])
    async with (
        _webhook(200) as (address, got),
        watching(databases, address, "http://monitor", every_s=0.1),
        asyncio.timeout(patience(20)),
    ):
        await record(monitor, *_steps(1, {"policy/parity_mean_abs": 0.5}))
        _, said = await got.get()
    assert said["kind"] == "parity"
    await databases.close()


async def test_a_killed_run_whose_own_database_has_stopped_with_it_is_looked_for_there(monitor: Monitor) -> None:
    await record(monitor, *_steps(3, {"reward/mean": 0.5}))
    run_sql(monitor.url, "UPDATE trainings SET heartbeat_at = now() + interval '1 hour'")
    own, databases = open_database(monitor.url, "killed"), Databases([])
    folder = RunFolder(key="killed", path=Path("killed"))
    databases.folders[folder.key] = folder
    databases.add(own)

    async def open_again() -> None:
        """As `show_folder` does for whoever wants to see the run."""
        await folder.wanted.wait()
        databases.add(open_database(monitor.url, "killed"))

    async with (
        _webhook(200) as (address, got),
        watching(databases, address, "http://monitor", every_s=0.1),
        asyncio.timeout(patience(20)),
        asyncio.TaskGroup() as tasks,
    ):
        await databases.remove(own)
        run_sql(monitor.url, "UPDATE trainings SET heartbeat_at = now() - interval '1 hour'")
        tasks.create_task(open_again())
        _, said = await got.get()
    assert (said["run_id"], said["kind"], "its process is gone" in said["text"]) == ("killed.1", "stalled", True)
    await databases.close()
