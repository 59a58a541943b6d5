"""What others on the machine get of a run: nothing from its listeners, and no secret from what it writes or shows."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from cua_rl.database.postgres import EmbeddedPostgres
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.end_to_end.runs import Run, survivors

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("node") is None, reason="the agent of these tests is a Node program; install Node"),
]

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "OPENAI_API_KEY": "canary-01",
    "HF_TOKEN": "canary-02",
    "AWS_SECRET_ACCESS_KEY": "canary-03",
    "PGPASSWORD": "canary-04",
    "GITHUB_TOKEN": "canary-05",
    "JUDGE_API_KEY": "canary-06",
    "SENTRY_DSN": "https://canary-07@127.0.0.1/1",
    "SOME_URL": "http://127.0.0.1/?token=canary-08",
    "MONITOR_WRITE_TOKEN": "canary-09-of-the-monitor",
    "PROXY_AUTHORIZATION": "Basic canary-10",
    "WANDB_MODE": "offline",
}
SETTINGS = {
    "tinker_api_key": "canary-11",
    "agent.name": "external",
    "agent.command": f"node {ROOT}/examples/agents/agent.mjs --token canary-14 "
    "--header 'Authorization: Bearer canary-15' http://canary-12:x@127.0.0.1:9/v1?api_key=canary-13",
    "wandb_project": "test",
}
CANARIES = [f"canary-{number:02}" for number in range(1, 16)]


def found_in(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run showed while it was at work, and what it left."""

    folder: Path
    output: str
    command_lines: str
    api: str
    listeners: list[dict[str, Any]]
    listeners_status: int
    survivors: list[psutil.Process]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Generator[Seen]:
    """One run with secrets wherever a run may have some, with every listener that a run may have."""
    assert found_in(json.dumps([ENVIRONMENT, SETTINGS])) == CANARIES
    folder = tmp_path_factory.mktemp("watched")
    (folder / "settings.yaml").write_text(json.dumps(SETTINGS))
    options = ("--config", str(folder / "settings.yaml"), "gbox_api_key=canary-01", "skip_baseline=true")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        run = Run(folder / "run", "max_steps=2", *options, "eval_tasks=none", "trainer.num_processes=2")
        agent = run.wait_for(lambda: hold_an_agent(run))  # everything else runs before an agent does
        command = [sys.executable, "-m", "scripts.listeners", str(run.process.pid)]
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        agent.resume()
        agent = run.wait_for(lambda: run.steps() and hold_an_agent(run))  # and the run, until it has been looked at
        lines = [" ".join(command_line(process)) for process in (psutil.Process(run.process.pid), *run.owned())]
        address = next(line.split()[-1] for line in run.output().splitlines() if line.startswith("monitor at"))
        with httpx.Client(base_url=address, trust_env=False, timeout=patience(60)) as client:
            paths = ("/api/runs", "/api/runs/1", "/api/runs/1/rollouts")
            api = "".join(client.get(path).raise_for_status().text for path in paths)
        owned = run.owned()
        agent.resume()
        assert run.finish() == 0, run.output()
        yield Seen(
            folder=run.folder,
            output=run.output(),
            # what an agent is told is its command's own
            command_lines=" ".join(line for line in lines if "agent.mjs" not in line),
            api=api,
            listeners=[json.loads(line) for line in asked.stdout.splitlines()],
            listeners_status=asked.returncode,
            survivors=survivors(owned),
        )


def hold_an_agent(run: Run) -> psutil.Process | None:
    """An agent that waits until it is resumed, and the run's step with it."""
    for process in filter(is_agent, run.owned()):
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            return process
    return None


def is_agent(process: psutil.Process) -> bool:
    words = command_line(process)
    return bool(words) and words[0].endswith("node") and any("agent.mjs" in word for word in words)


def test_a_stranger_gets_nothing_from_any_listener_of_a_run(seen: Seen) -> None:
    rows = seen.listeners
    assert [row for row in rows if row["is_open"]] == []
    assert seen.listeners_status == 0
    addresses = [row["address"] for row in rows]
    assert any(address.endswith("/vllm.sock") for address in addresses)
    assert any(".s.PGSQL" in address for address in addresses)
    assert {row["address"].rpartition(":")[0] for row in rows if row["kind"] == "tcp"} == {"127.0.0.1"}
    assert not [row for row in rows if row["kind"] == "udp"]
    assert seen.survivors == []


def test_no_secret_is_in_what_a_run_shows_or_in_its_folder(seen: Seen) -> None:
    assert found_in(seen.command_lines) == []
    assert found_in(seen.api) == []
    assert "***" in seen.api
    assert found_in(seen.output) == []
    config = (seen.folder / "config.json").read_text()
    assert '"judge"' in config
    assert "agent.mjs --token *** --header 'Authorization: ***' http://***:***@127.0.0.1:9/v1?api_key=***" in config
    written = [path for path in seen.folder.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in written)
    assert {path: found for path in written if (found := found_in(path.read_text(errors="replace")))} == {}
    services = seen.folder / "postgres"
    loose = [path for path in (seen.folder, *written) if services not in path.parents and path.stat().st_mode & 0o066]
    assert loose == []


async def test_no_secret_is_in_the_database_or_in_an_export(seen: Seen, tmp_path: Path) -> None:
    async with EmbeddedPostgres(seen.folder / "postgres", tmp_path / "postgres.log") as server:
        with psycopg.connect(server.url) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            texts = [str(connection.execute(f'SELECT * FROM "{name}"').fetchall()) for (name,) in tables]
    assert len(texts) > 10
    assert found_in("".join(texts)) == []
    export = tmp_path / "step.html"
    command = [sys.executable, "-m", "cua_rl.recipes.export_rollout", f"run={seen.folder}", "step=1", f"out={export}"]
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    assert export.stat().st_mode & 0o777 == 0o600
    assert found_in(export.read_text()) == []
