"""One vLLM on a tiny random model for all tests of this folder."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from tests.real.sampling.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny_qwen3_vl"))


@pytest.fixture(scope="session")
def tiny_renderer(tiny_model: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl(tiny_model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmServer]:
    config = ServerConfig(
        model_path=tiny_model, max_lora_rank=8, max_model_len=2048, max_num_seqs=32, max_images=4, kv_cache_gib=0.25
    )
    async with VllmServer(config, tmp_path_factory.mktemp("logs") / "vllm.log") as server:
        yield server
