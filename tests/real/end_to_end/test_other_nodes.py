"""A run on nodes of a Ray cluster that are not like its own: with other code and task files, another database, or a
wrong clock.
"""

import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg.rows import namedtuple_row

from cua_rl.cluster import PACKAGE
from cua_rl.database.migrations import migrate_blocking
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.host.processes import OwnedProcess
from cua_rl.sampling.server import VllmServer
from scripts.chaos_ray import open_cluster
from scripts.chaos_record import ExpectedRun, find_faults
from tests.real.database.conftest import run_sql, with_database
from tests.real.end_to_end.runs import read_lines

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

AHEAD_S = 5400.0
# what a process with a wrong clock reads; Ray's own programs do not compare clocks
WRONG_CLOCK = f"""
import datetime, time
right = time.time
time.time = lambda: right() + {AHEAD_S}
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Ahead
"""
TASKS = ("train_01_open_settings", "train_08_enable_bluetooth")
TIMES = """
    SELECT r.worker, r.status, extract(epoch FROM r.started_at)::float AS started_at, r.started_unix_s,
           extract(epoch FROM r.ended_at)::float AS ended_at,
           (SELECT array_agg(t.started_unix_s) FROM turns t WHERE t.rollout_pk = r.id) AS turns_started_at,
           extract(epoch FROM e.started_at)::float AS had_device_at
    FROM rollouts r JOIN groups g ON g.id = r.group_pk JOIN environments e ON e.rollout_pk = r.id
    WHERE g.step_id IS NOT NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is left of the run."""

    status: int
    output: str
    folder: Path
    began_at: float
    rollouts: list[Any]
    faults: list[str]


def environment_of(folder: Path, tasks: str) -> dict[str, str]:
    """A home with a task file."""
    folder.mkdir()
    (folder / "tasks.txt").write_text(tasks)
    return {"HOME": str(folder)}


def with_code(folder: Path) -> dict[str, str]:
    """Let this folder's modules come before others."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def other_nodes(folder: Path, url: str) -> list[Mapping[str, str]]:
    """The variables of nodes that are not like the run's."""
    code, clock = folder / "code", folder / "clock"
    shutil.copytree(PACKAGE, code / "cua_rl", ignore=shutil.ignore_patterns("__pycache__"))
    with (code / "cua_rl" / "rewards" / "reward.py").open("a") as module:
        module.write("# another line\n")
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(WRONG_CLOCK)
    run_sql(url, "CREATE DATABASE other")
    migrate_blocking(with_database(url, "other"))
    return [
        with_code(code) | environment_of(folder / "home", f"{TASKS[0]}\n"),
        {"DATABASE_URL": with_database(url, "other")},
        with_code(clock),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Seen]:
    folder, began_at = tmp_path_factory.mktemp("nodes"), time.time()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    tasks = json.dumps({"source_type": "file", "file_path": "~/tasks.txt"})
    async with EmbeddedPostgres(folder / "postgres", folder / "postgres.log") as postgres:
        url = postgres.url
        environment = {**os.environ, **token, **environment_of(folder / "right-home", "\n".join(TASKS))}
        environment |= {"DATABASE_URL": url} | with_code(PACKAGE.parent)
        others = other_nodes(folder, url)
        async with open_cluster(folder, environment, *others) as (address, _):
            options = [
                *(f"log_path={folder / 'run'}", f"base_url={server.base_url}", "rollout_workers=4", f"tasks={tasks}"),
                *("max_steps=3", "group_size=4", "groups_per_batch=4", "max_concurrent_rollouts=8"),
                *("skip_baseline=true", "eval_every=0", "num_eval_rollouts=4", "monitor=false", "eval_tasks=none"),
            ]
            run = OwnedProcess(
                [sys.executable, "-m", "cua_rl.recipes.train", *options],
                name="train",
                log_path=folder / "train.log",
                environment=environment | {"RAY_ADDRESS": address},
                folder=folder,
            )
            async with run:
                status = await run.wait()
        with psycopg.connect(url, autocommit=True, row_factory=namedtuple_row) as connection:
            rollouts = connection.execute(TIMES).fetchall()
        expected = ExpectedRun(run_folder=folder / "run", num_steps=3, group_size=4, groups_per_batch=4, max_lag=0)
        yield Seen(
            status=status,
            output=(folder / "train.log").read_text(),
            folder=folder / "run",
            began_at=began_at,
            rollouts=rollouts,
            faults=await find_faults(url, expected),
        )


async def test_a_node_with_other_code_and_tasks_or_another_database_is_left_out_and_named_while_the_run_goes_on(
    seen: Seen,
) -> None:
    assert (seen.status, seen.faults) == (0, []), seen.output[-4000:]
    left_out = dict(re.findall(r"worker=(\S+) left out: (.*)", seen.output))
    assert len(left_out) == 2
    (code,) = [name for name, why in left_out.items() if "expected the run's code and task files on " in why]
    (database,) = [name for name, why in left_out.items() if "expected the run's database, got " in why]
    assert "/other?" in left_out[database]
    steps = [step for step in read_lines(seen.folder / "metrics.jsonl") if "reward/mean" in step]
    assert steps[-1]["device/num_workers_missing"] == 2.0
    assert f"2 of 4 rollout workers do not run. {min(code, database)}: it is left out: " in seen.output
    assert {row.worker for row in seen.rollouts} == {f"worker-{number}" for number in range(1, 5)} - {code, database}


async def test_what_a_node_with_a_wrong_clock_does_is_recorded_in_the_time_of_the_run(seen: Seen) -> None:
    logs = "".join((seen.folder / "logs" / f"worker-{number}.log").read_text() for number in range(1, 5))
    ((wrong, by_s),) = re.findall(r"worker=(\S+) the clock of \S+ is wrong by (\d+) s", logs)

    assert float(by_s) == pytest.approx(AHEAD_S, abs=60.0)  # measuring may take that long on a busy machine
    assert wrong in {row.worker for row in seen.rollouts}
    for row in seen.rollouts:
        assert row.status == "completed"
        times = [seen.began_at, row.had_device_at, row.ended_at, time.time()]
        assert times == sorted(times)
        assert row.started_at == pytest.approx(row.started_unix_s, abs=1e-5)
        assert all(row.started_at <= started_at <= row.ended_at for started_at in row.turns_started_at)
