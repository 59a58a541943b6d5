"""A fake model server on a socket."""

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.rollout import SamplingParams
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
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run", max_attempts=3) as sampling:
            yield sampling


@pytest.fixture
def gateway(client: SamplingClient, renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, renderer, SamplingParams(max_tokens=64, temperature=1.0))
