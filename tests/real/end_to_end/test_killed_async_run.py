"""An asynchronous run with a real model server, trainer and database is killed, resumed and judged by its record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.sampling.server import VllmServer

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.timeout(600)
def test_a_killed_asynchronous_run_trains_every_group_once_and_loses_none(server: VllmServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.chaos_kill", f"folder={tmp_path}", f"base_url={server.base_url}"]
    options = ["kills=1", "steps=4", "max_lag=2", "seed=1"]

    done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["faults"] == []
    assert (verdict["kills"], verdict["steps"], verdict["exit_status"]) == (1, 4, 0)
    assert "largest lag" in done.stdout
