"""A model served for other hosts, beside the run's own server, without a folder that both see."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cua_rl.host.processes import free_port
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.canary import Canary, canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.sampling.vllm_responses import RESPONSES_PATH
from cua_rl.types.rollout import AdapterRef
from tests.patience import patience
from tests.real.sampling.tiny_model import adapter_logprobs, build_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

KEY = {API_KEY_VARIABLE: "a-key-that-nobody-guesses"}
REQUEST = {"input": "hi", "max_output_tokens": 4}


@pytest_asyncio.fixture(loop_scope="session")
async def process(tiny_model: Path, tmp_path: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    options = [f"model_name={tiny_model}", f"port={free_port()}", f"log_file={tmp_path / 'vllm.log'}"]
    words = [*options, "lora_rank=8", "max_model_len=2048", "max_images=4", "max_num_seqs=8", "dtype=float32"]
    command = [sys.executable, "-m", "cua_rl.recipes.serve_model", *words]
    serving = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **KEY}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    yield serving
    serving.send_signal(signal.SIGINT)
    assert await serving.wait() == 130
    assert not psutil.pid_exists(serving.pid)


async def test_a_served_model_gets_adapters_over_http_and_rejoins_after_a_crash(
    process: asyncio.subprocess.Process,
    vllm: VllmServer,
    tiny_model: Path,
    tiny_renderer: Qwen3VLRenderer,
    tmp_path: Path,
) -> None:
    tokens = canary_tokens(tiny_renderer)
    adapter = build_adapter(tiny_model, tmp_path / "adapter", scale=0.1)
    canary = Canary(
        tokens=tokens,
        changes_model=True,
        training_logprobs=adapter_logprobs(tiny_model, adapter, tokens),
        training_base_logprobs=adapter_logprobs(tiny_model, None, tokens),
    )
    assert process.stdout is not None
    said = ""
    while "model server: " not in said:
        said = (await process.stdout.readline()).decode()
        assert said, "the server ended"
    address = said.split("model server: ")[1].split(",")[0]

    async with (
        ExternalServer(address, KEY) as remote,
        SamplingClient(vllm, remote, namespace="served", check_interval_s=0.2) as client,
    ):
        own = client.replicas[0]
        await client.publish(AdapterRef(path=adapter, policy_version=1), canary)
        assert remote.model.takes_adapters
        # the first rollout goes to the first server, the second one to the other
        for key in ("a", "b"):
            assert (await client.respond(RESPONSES_PATH, REQUEST, sticky_key=key))[1] is not None

        engine = next(
            one for one in psutil.Process(process.pid).children(recursive=True) if "vllm" in one.name().lower()
        )
        engine.kill()
        asks = [client.respond(RESPONSES_PATH, REQUEST, sticky_key="b") for _ in range(3)]
        assert all(used is not None for _, used in await asyncio.gather(*asks))
        assert client.replicas == (own,)

        async with asyncio.timeout(patience(240)):
            while len(client.replicas) < 2:
                await asyncio.sleep(0.1)
