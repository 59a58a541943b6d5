"""One vLLM for all tests that do not test its start or its end."""

from collections.abc import AsyncGenerator, Generator

import pytest
import pytest_asyncio

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer


@pytest.fixture(scope="session", autouse=True)
def server_key() -> Generator[None]:
    """One key for all servers, which runs find in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, "key-of-the-tests")
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmServer]:
    config = ServerConfig(
        model_path=TINY_QWEN3_VL, max_lora_rank=16, max_model_len=2048, max_num_seqs=36, kv_cache_gib=0.25
    )
    async with VllmServer(config, tmp_path_factory.mktemp("logs") / "vllm.log") as server:
        yield server
