"""Secrets of environment and configuration are in nothing that a run writes or shows."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from cua_rl.database.postgres import EmbeddedPostgres
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.end_to_end.runs import Run, survivors

pytestmark = pytest.mark.timeout(900)

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


@pytest.mark.skipif(shutil.which("node") is None, reason="the agent of this test is a Node program; install Node")
async def test_no_secret_is_in_folder_database_api_or_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(json.dumps([ENVIRONMENT, SETTINGS])) == CANARIES
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS))

    options = ("--config", str(tmp_path / "settings.yaml"), "gbox_api_key=canary-01", "skip_baseline=true")
    run = Run(tmp_path / "run", "max_steps=2", *options, "eval_tasks=none")
    run.wait_for(lambda: len(run.steps()) == 1)
    lines = [" ".join(command_line(process)) for process in (psutil.Process(run.process.pid), *run.owned())]
    shown = " ".join(line for line in lines if "agent.mjs" not in line)  # what an agent is told is its command's own
    address = next(line.split()[-1] for line in run.output().splitlines() if line.startswith("monitor at"))
    async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=patience(60)) as client:
        paths = ("/api/runs", "/api/runs/1", "/api/runs/1/rollouts")
        api = "".join([(await client.get(path)).raise_for_status().text for path in paths])
    owned = run.owned()
    assert run.finish() == 0, run.output()
    assert survivors(owned) == []

    assert found_in(shown) == []
    assert found_in(api) == []
    assert "***" in api
    assert found_in(run.output()) == []
    config = (run.folder / "config.json").read_text()
    assert '"judge"' in config
    assert "agent.mjs --token *** --header 'Authorization: ***' http://***:***@127.0.0.1:9/v1?api_key=***" in config
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in written)
    assert {path: found for path in written if (found := found_in(path.read_text(errors="replace")))} == {}
    async with EmbeddedPostgres(run.folder / "postgres", tmp_path / "postgres.log") as server:
        with psycopg.connect(server.url) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            texts = [str(connection.execute(f'SELECT * FROM "{name}"').fetchall()) for (name,) in tables]
    assert len(texts) > 10
    assert found_in("".join(texts)) == []
    export = tmp_path / "step.html"
    command = [sys.executable, "-m", "cua_rl.recipes.export_rollout", f"run={run.folder}", "step=1", f"out={export}"]
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    assert export.stat().st_mode & 0o777 == 0o600
    assert found_in(export.read_text()) == []
    services = run.folder / "postgres"
    loose = [path for path in (run.folder, *written) if services not in path.parents and path.stat().st_mode & 0o066]
    assert loose == []
