"""The controller starts quickly and without the libraries of the trainer and the model server."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("openai", "torch", "vllm", "peft", "transformers", "tensorboard", "matplotlib", "wandb")
LIMIT_S = 1.0
REFERENCE_S = 0.1  # what the loop below takes on a current machine that has nothing else to do
ATTEMPTS = 3

PROGRAM = """
import sys, time
began = time.process_time()
import cua_rl.recipes.train
imported = time.process_time()
sum(number * number for number in range(2_500_000))
print(imported - began, time.process_time() - imported, *(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_the_training_recipe_imports_without_heavy_libraries_in_under_a_second() -> None:
    """On a slow or busy machine, the second stretches as much as a loop of plain Python does."""
    stretched: list[float] = []
    for _ in range(ATTEMPTS):
        import_s, reference_s, *loaded = subprocess.run(
            [sys.executable, "-c", PROGRAM, *HEAVY], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        assert loaded == []
        stretched.append(float(import_s) / max(1.0, float(reference_s) / REFERENCE_S))

    assert min(stretched) < LIMIT_S


@pytest.mark.parametrize("suffix", ["agent", "rl.sync_loop", "rollout.run", "sampling.client", "training.client"])
def test_each_part_of_the_controller_imports_alone(suffix: str) -> None:
    """A module that works only after another one was imported would fail here."""
    subprocess.run([sys.executable, "-c", f"import cua_rl.{suffix}"], check=True, timeout=60, cwd=Path.cwd())
