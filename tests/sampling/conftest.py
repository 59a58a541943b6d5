"""A fake model server on a socket, and one real vLLM on a tiny random model for all tests marked `real`."""

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.config import ServerConfig
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_server import serve_app
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.types import SamplingParams
from tests.renderers.model_folders import build_small_folder
from tests.sampling.fake_vllm import FakeVllm

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_folder(tmp_path_factory.mktemp("renderer_only"))


@pytest.fixture(scope="session")
def renderer(folder: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl(folder)


@pytest.fixture
def fake(renderer: Qwen3VLRenderer) -> FakeVllm:
    return FakeVllm(renderer)


@pytest_asyncio.fixture
async def client(fake: FakeVllm) -> AsyncGenerator[SamplingClient]:
    async with serve_app(fake.app(), "127.0.0.1", 0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run", max_attempts=3) as sampling:
            yield sampling


@pytest.fixture
def gateway(client: SamplingClient, renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, renderer, SamplingParams(max_tokens=64, temperature=1.0))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.sampling.tiny_model import build_tiny_model  # torch and transformers: only where a model is needed

    return build_tiny_model(tmp_path_factory.mktemp("tiny_qwen3_vl"))


@pytest.fixture(scope="session")
def tiny_renderer(tiny_model: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl(tiny_model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmServer]:
    config = ServerConfig(model_path=tiny_model, max_lora_rank=8, max_model_len=2048, max_num_seqs=32, max_images=4)
    async with VllmServer(config, tmp_path_factory.mktemp("logs") / "vllm.log") as server:
        yield server
