"""What a rollout worker opens."""

from pathlib import Path

import pytest

from cua_rl.database.rows import Scope
from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import free_port
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.server import ServedModel
from cua_rl.types.errors import ConfigError
from cua_rl.workers.worker import WorkerSetup, find_servers
from tests.sampling.fake_vllm import FakeVllm

MODEL = ServedModel(name="base", max_model_len=2048, version="0.32.0")


@pytest.fixture(scope="module")
def fake() -> FakeVllm:
    return FakeVllm(load_qwen3_vl(TINY_QWEN3_VL))


def setup_with(*urls: str) -> WorkerSetup:
    return WorkerSetup(
        config=CLIConfig(),
        judge=None,
        identity={},
        environ={},
        log_path=Path("/run"),
        database_url="postgresql://nowhere",
        scope=Scope(image_token_id=1),
        servers=tuple((url, None, MODEL) for url in urls),
        namespace="run",
        clock_ahead_s=0.0,
    )


async def test_a_worker_starts_while_one_of_the_model_servers_is_away(fake: FakeVllm) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        servers = await find_servers(setup_with(away, url), "a", patience_s=0.0)
    assert {server.base_url for server in servers} == {away, url}
    assert [server.model for server in servers] == [MODEL, MODEL]


async def test_a_worker_that_reaches_no_model_server_says_so() -> None:
    with pytest.raises(ConfigError, match="base_url: expected a vLLM server at"):
        await find_servers(setup_with(f"http://127.0.0.1:{free_port()}"), "a", patience_s=0.0)


async def test_workers_begin_with_different_servers(fake: FakeVllm) -> None:
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        setup = setup_with(url, f"{url}/v1/v1")
        first = [(await find_servers(setup, f"worker-{number}"))[0].base_url for number in range(20)]
    assert len(set(first)) == 2
