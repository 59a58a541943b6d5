"""One tiny model on disk for all trainer tests."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads: test machines are shared

import pytest

from cua_rl.config import LoraConfig, TrainerConfig
from tests.real.training.tiny_qwen3_vl import build_random_qwen3_vl


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_qwen3_vl(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def config(model_path: Path) -> TrainerConfig:
    return TrainerConfig(model_path=model_path, lora=LoraConfig(rank=4, alpha=8))
