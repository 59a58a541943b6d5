"""Our Tinker service, its trainer and its model server are killed while unmodified clients go on."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.host.processes import free_port
from tests.patience import patience
from tests.real.tinker.conftest import ROOT

KEY = "tml-key-of-the-tests"


@pytest.mark.timeout(900)
def test_a_run_through_kills_of_each_part_is_the_run_that_nobody_disturbed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.chaos_tinker", f"folder={tmp_path}", "kills=3", "steps=16", "seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience(900))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["kills"], verdict["steps"], verdict["faults"]) == (3, 16, [])
    assert verdict["service_starts"] >= 2


@pytest.mark.timeout(1800)
def test_every_check_of_kills_and_resumption_passes(tmp_path: Path) -> None:
    """T4 of the conformance suite."""
    port, results = free_port(), tmp_path / "results.json"
    settings = (f"port={port}", f"log_path={tmp_path / 'run'}", "lora_rank=8", "server.max_model_len=1024")
    serve = shlex.join([sys.executable, "-m", "cua_rl.recipes.serve_tinker", *settings])
    command = [ROOT / ".venv-tinker/bin/python", "-m", "tinker_conformance", f"--base-url=http://127.0.0.1:{port}"]
    options = [f"--api-key={KEY}", "--tier", "T4", "--serve", serve, f"--json={results}"]
    done = subprocess.run(
        [*command, *options, "--time-limit", str(patience(300))],
        cwd=ROOT,
        env={**os.environ, "TINKER_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(1800),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    outcomes = [result["outcome"] for result in json.loads(results.read_text())["results"]]
    assert len(outcomes) == outcomes.count("passed") >= 8
