"""Time limits of tests are those of an idle machine, whatever else runs."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import IdleClock

ROOT = Path(__file__).parents[1]

HANGS = """
import time

def test_that_hangs():
    time.sleep(600)

def test_that_comes_after():
    pass
"""


def test_a_second_beside_two_others_on_each_core_is_a_third_of_a_second() -> None:
    times, shares = iter([100.0, 106.0, 116.0]), iter([3.0, 1.0])
    clock = IdleClock(lambda: next(times), lambda: next(shares))

    assert clock.look() == 2.0  # six seconds, with three processes to a core
    assert clock.look() == 12.0  # and ten alone


def test_a_test_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    plugins = ("-p", "pytest_timeout", "-p", "tests.patience", "--timeout=0.2")
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(tmp_path), str(tmp_path)]

    done = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, check=False)

    assert "test_that_hangs - Failed: Timeout (>0.2s)" in done.stdout, done.stdout
    assert "1 failed, 1 passed" in done.stdout
