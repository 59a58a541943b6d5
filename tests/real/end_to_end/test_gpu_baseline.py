"""The baseline's command, as somebody who contributes a row runs it, with the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cua_rl.reporting.json_lines import read_records

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(600)


def test_a_run_that_is_out_of_time_ends_in_order_and_its_finished_steps_are_measured(tmp_path: Path) -> None:
    command = ["--model", "embedded", "--steps", "50", "--minutes", "0", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_baseline", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    logged = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if "time/step_s" in record]
    # a step may be recorded, and the run end before it is logged
    assert 2 <= len(logged) <= figures["steps"] <= len(logged) + 1
    assert figures["success_rate"][: len(logged)] == pytest.approx(
        [record["reward/success_rate"] for record in logged], rel=1e-3
    )
    assert sum(figures["time_frac"].values()) == pytest.approx(1.0, abs=1e-3)
    assert min(figures["seconds"].values()) > 0
    # what the loop itself timed: steps, but not what lies between them
    step_s = sum(float(str(record["time/step_s"])) for record in logged[1:])
    assert step_s <= figures["seconds"]["whole"] * 1.01
    assert min(*figures["tflop"].values(), *figures["tokens_per_s"].values(), *figures["images_per_s"].values()) > 0
    assert not any(str(tmp_path) in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
