"""A run whose rollouts are in workers on Ray; one is killed in the middle of a step, and one is stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import psycopg
import pytest
from sqlalchemy import text

from cua_rl.database.postgres import running_postgres_url
from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.recorded_run import open_run_database
from cua_rl.sampling.server import VllmServer
from tests.live_processes import command_line
from tests.patience import IdleClock, slowness
from tests.real.end_to_end.runs import DEADLINE_S, Run, survivors

_ATTEMPTS = """
    SELECT g.id AS group_pk, r.member_index, r.status, r.error, r.started_at, r.ended_at, r.num_turns,
           r.worker, r.device_id,
           (SELECT count(*) FROM turns t WHERE t.rollout_pk = r.id) AS num_turn_rows
    FROM rollouts r JOIN groups g ON g.id = r.group_pk WHERE g.step_id IS NOT NULL
    ORDER BY g.id, r.member_index, r.started_at, r.status = 'completed'
"""


def workers(run: Run) -> list[psutil.Process]:
    return [process for process in run.owned() if " ".join(command_line(process)).startswith("ray::RolloutWorker")]


@contextmanager
def in_slices(server: VllmServer, look: Callable[[], bool]) -> Generator[None]:
    """The model server stopped, as by SIGSTOP, while `look` holds; until then it runs for a moment at a time.

    Rollouts hardly advance meanwhile, so the database, which is behind them, knows all that have started or ended.
    """
    address = server.base_url.removeprefix("unix:")
    children = psutil.Process().children(recursive=True)
    stopped = {one for served in children if address in command_line(served) for one in served.children(recursive=True)}
    assert stopped
    clock, is_there = IdleClock(), False
    while not is_there:
        assert clock.look() < DEADLINE_S
        time.sleep(0.05)
        for one in stopped:
            one.suspend()
        try:
            time.sleep(1.5 * slowness())
            if is_there := look():
                yield
        finally:
            for one in stopped:
                one.resume()


def is_acting(folder: Path) -> bool:
    """Whether most of the 16 rollouts of the second step are on devices: more than two of three workers hold."""
    url = running_postgres_url(folder / "postgres")
    if url is None:
        return False
    query = """SELECT count(*) >= 12 FROM rollouts r JOIN groups g ON g.id = r.group_pk JOIN steps s ON s.id = g.step_id
               WHERE s.step = 2 AND r.status = 'running'"""
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchone() == (True,)


async def load_attempts(folder: Path) -> Sequence[Any]:
    async with open_run_database(str(folder), os.environ) as (database, _), database.sessions() as session:
        return (await session.execute(text(_ATTEMPTS))).all()


@pytest.mark.timeout(600)
def test_rollouts_of_a_killed_worker_run_again_once_and_the_record_is_whole(server: VllmServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("rollout_workers=3", "skip_baseline=true", "num_eval_rollouts=4", "max_steps=3", "monitor=false")
    run = Run(folder, *options, f"base_url={server.base_url}")
    run.wait_for(lambda: run.steps())
    owned = run.owned()
    killed, stopped, _ = workers(run)
    with in_slices(server, lambda: is_acting(folder)):
        os.kill(killed.pid, signal.SIGKILL)
    run.wait_for(lambda: len(run.steps()) >= 2)
    os.kill(stopped.pid, signal.SIGSTOP)  # it is silent, and its process is not seen to end

    assert run.finish() == 0, run.output()
    assert survivors(owned) == []
    assert len(run.steps()) == 3
    attempts: dict[tuple[int, int], list[Any]] = {}
    for row in asyncio.run(load_attempts(folder)):
        attempts.setdefault((row.group_pk, row.member_index), []).append(row)
    assert len(attempts) == 3 * 4 * 4
    for tried in attempts.values():
        assert [row.status for row in tried] in (["completed"], ["failed", "completed"])
        assert [row.num_turns for row in tried] == [row.num_turn_rows for row in tried]
        assert all(row.device_id.startswith(f"{row.worker}/") for row in tried if row.device_id)
    again = [tried for tried in attempts.values() if len(tried) == 2]
    died = [tried for tried in again if "silent" not in tried[0].error]
    assert 1 <= len(died) <= 8
    for lost, repeated in again:
        assert f"rollout worker {lost.worker!r} was given up: " in lost.error
        assert repeated.worker != lost.worker
        assert (repeated.started_at - lost.ended_at).total_seconds() < 30
    assert len({lost.worker for lost, _ in again}) == (1 if len(again) == len(died) else 2)
    counts = [record for record in read_records(folder / "metrics.jsonl") if "device/num_workers" in record]
    # the one that was killed, and the one that was stopped if a step ended after it had been given up
    assert sum(cast("float", record["device/num_workers_lost"]) for record in counts) >= 1
    assert all(cast("float", record["device/num_workers_missing"]) <= 2 for record in counts)
    assert {record["rollout/num_model_servers"] for record in counts} == {1.0}
    command = [sys.executable, "-m", "cua_rl.recipes.rebuild_datums", f"run={folder}"]
    rebuilt = subprocess.run(command, capture_output=True, text=True)
    assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
    assert rebuilt.stdout.count("equal") == 3
    logs = [(folder / "logs" / f"worker-{number}.log").read_text() for number in (1, 2, 3)]
    assert all("is open on" in log for log in logs)
