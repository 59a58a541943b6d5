"""Model servers on nodes of a Ray cluster: they come back at their addresses, and nothing of them is left."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cua_rl.host.masking import make_key
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.server import ask_model_server
from cua_rl.types.errors import ConfigError
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.ray_nodes import NODE_ENVIRONMENT, head_command

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

KEY = "a-key-that-nobody-guesses"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def environment(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[dict[str, str]]:
    """Of a cluster with room for two servers."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": make_key(), API_KEY_VARIABLE: KEY}
    given = {**os.environ, **secret, **NODE_ENVIRONMENT}
    port, folder = free_port(), make_scratch_folder("ray")
    command = [*head_command("127.0.0.1", port), f"--temp-dir={folder}"]
    log_path = tmp_path_factory.mktemp("ray") / "node.log"
    async with OwnedProcess(command, name="node", log_path=log_path, environment=given) as node:
        async with asyncio.timeout(patience(120.0)):
            while "Ray runtime started" not in node.log_tail():
                assert node.is_running, node.log_tail()
                await asyncio.sleep(0.1)
        yield {**given, "RAY_ADDRESS": f"127.0.0.1:{port}"}


def serving(address: str) -> list[psutil.Process]:
    """The processes of the server at this address."""
    port = address.rpartition(":")[2]
    return [one for one in psutil.Process().children(recursive=True) if f"--port {port}" in " ".join(command_line(one))]


async def until_it_answers(address: str) -> None:
    async with asyncio.timeout(patience(300.0)):
        while True:
            with suppress(ConfigError):
                async with ask_model_server(address, KEY) as (_, model):
                    assert model.takes_adapters
                    return
            await asyncio.sleep(0.2)


async def next_address(said: asyncio.StreamReader) -> str:
    """Of the next server that is said to be there; Ray says other things."""
    while not (line := (await said.readline()).decode()).startswith("model server: "):
        assert line, "the recipe has ended"
    return line.removeprefix("model server: ").split(", which asks for ")[0]


async def test_two_servers_on_a_cluster_come_back_where_they_were_and_end_with_their_recipe(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = ["num_replicas=2", f"port={free_port()}", f"log_file={tmp_path / 'vllm.log'}", "lora_rank=8"]
    options += ["max_model_len=2048", "max_images=4", "max_num_seqs=8", "dtype=float32"]
    recipe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cua_rl.recipes.serve_model", *options),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=(tmp_path / "said").open("wb"),
    )
    assert recipe.stdout is not None, "it is piped"
    addresses = [await next_address(recipe.stdout) for _ in range(2)]
    assert len(set(addresses)) == 2
    for address in addresses:
        await until_it_answers(address)
        assert len(serving(address)) >= 1

    serving(addresses[0])[-1].kill()  # it is started again on its node
    actors = [one for one in psutil.Process().children(recursive=True) if "ray::Replica" in " ".join(command_line(one))]
    assert len(actors) == 2
    next(one for one in actors if set(serving(addresses[1])) & set(one.children(recursive=True))).kill()
    async with asyncio.timeout(patience(300.0)):
        assert await next_address(recipe.stdout) == addresses[1]
    for address in addresses:
        await until_it_answers(address)
    owned = [one for address in addresses for one in serving(address)]
    recipe.send_signal(signal.SIGINT)
    async with asyncio.timeout(patience(60.0)):
        assert await recipe.wait() == 130
    _, alive = psutil.wait_procs(owned, timeout=patience(20.0))
    assert alive == []
    assert KEY not in (tmp_path / "said").read_text()
    assert [path.name for path in sorted(tmp_path.glob("vllm*.log"))] == ["vllm-1.log", "vllm-2.log"]
