"""The controller starts quickly and without the libraries of the trainer and the model server."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "peft", "transformers", "tensorboard", "matplotlib", "wandb")
LIMIT_S = 1.0
ATTEMPTS = 3  # the best of a few: a busy machine makes single figures meaningless

PROGRAM = """
import sys, time
began = time.perf_counter()
import cua_rl.recipes.train
seconds = time.perf_counter() - began
print(seconds, *(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_the_training_recipe_imports_without_heavy_libraries_in_under_a_second() -> None:
    best_s = float("inf")
    for _ in range(ATTEMPTS):
        seconds, *loaded = subprocess.run(
            [sys.executable, "-c", PROGRAM, *HEAVY], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        assert loaded == []
        best_s = min(best_s, float(seconds))

    assert best_s < LIMIT_S


@pytest.mark.parametrize("suffix", ["agent", "rl.sync_loop", "rollout.run", "sampling.client", "training.client"])
def test_each_part_of_the_controller_imports_alone(suffix: str) -> None:
    """A module that works only after another one was imported would fail here."""
    subprocess.run([sys.executable, "-c", f"import cua_rl.{suffix}"], check=True, timeout=60, cwd=Path.cwd())
