"""Benchmarks start: whoever measures after a change does not find a module gone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_benchmark_can_be_started_as_a_module() -> None:
    names = sorted(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py"))
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert names
