"""The controller starts without the libraries of the trainer and the model server."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("openai", "torch", "vllm", "peft", "transformers", "tensorboard", "matplotlib", "wandb")
PROGRAM = "import sys, cua_rl.run.training; print(*(name for name in sys.argv[1:] if name in sys.modules))"


def test_a_training_run_imports_without_heavy_libraries() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HEAVY], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()

    assert loaded == []


@pytest.mark.parametrize("suffix", ["agent", "rl.sync_loop", "rollout.run", "sampling.client", "training.client"])
def test_each_part_of_the_controller_imports_alone(suffix: str) -> None:
    """A module that works only after another one was imported would fail here."""
    subprocess.run([sys.executable, "-c", f"import cua_rl.{suffix}"], check=True, timeout=120, cwd=Path.cwd())
