"""One tiny model on disk for all trainer tests."""

from pathlib import Path

import pytest

from tests.training.tiny_qwen3_vl import build_random_qwen3_vl


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_qwen3_vl(tmp_path_factory.mktemp("models") / "tiny")
