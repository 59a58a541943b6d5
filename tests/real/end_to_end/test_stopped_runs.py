"""A run with a real model server, trainer and database is killed or preempted, resumed and judged by its record."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cua_rl.sampling.server import VllmServer

REPOSITORY = Path(__file__).parents[3]


def chaos(server: VllmServer, folder: Path, *options: str) -> dict[str, Any]:
    """The verdict about a run of four steps that is stopped, and resumed, with no checkpoint due before its end."""
    command = [sys.executable, "-m", "scripts.chaos_kill", f"folder={folder}", f"base_url={server.base_url}"]
    command += ["steps=4", "num_eval_rollouts=8"]

    done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "largest lag" in done.stdout
    verdict: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert verdict["faults"] == []
    assert (verdict["steps"], verdict["exit_status"]) == (4, 0)
    return verdict


@pytest.mark.timeout(600)
@pytest.mark.parametrize("preemptions", [0, 1])
def test_a_stopped_asynchronous_run_trains_every_group_once_and_loses_none(
    server: VllmServer, tmp_path: Path, preemptions: int
) -> None:
    verdict = chaos(server, tmp_path, "kills=1", "max_lag=2", "seed=1", f"preemptions={preemptions}")

    assert verdict["kills"] == 1


@pytest.mark.timeout(900)
def test_a_synchronous_run_that_is_preempted_twice_is_the_run_that_never_was(
    server: VllmServer, tmp_path: Path
) -> None:
    verdict = chaos(server, tmp_path, "kills=2", "max_lag=0", "seed=1", "preemptions=1", "compare=true")

    assert verdict["kills"] == 2
    assert verdict["steps_with_equal_rewards"] == 4
    assert verdict["largest_gradient_gap_frac"] < 1e-4  # vLLM's kernels depend on the batch, by rounding
