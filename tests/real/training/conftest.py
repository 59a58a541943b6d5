"""One tiny model on disk for all trainer tests, and sequences to train it on."""

import os
import random
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads: test machines are shared

import pytest

from cua_rl.training.config import TrainerConfig
from cua_rl.types.rollout import Datum
from tests.real.training.tiny_qwen3_vl import build_random_qwen3_vl, draw_screenshot, make_datum


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_qwen3_vl(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def config(model_path: Path) -> TrainerConfig:
    return TrainerConfig(model_path=model_path, lora_rank=4, lora_alpha=8, max_restarts=0)


@pytest.fixture
def datums() -> list[Datum]:
    """Different lengths, sizes and numbers of images; one screenshot in two sequences; one sequence without images."""
    rng = random.Random(0)
    small = [draw_screenshot(rng) for _ in range(2)]
    wide = draw_screenshot(rng, width=160, height=64)
    return [
        make_datum(rng, [small[0], wide]),
        make_datum(rng, [small[0]], text=9, sampled=7),
        make_datum(rng, []),
        make_datum(rng, [wide, small[1], small[0]], text=3, sampled=4),
    ]
