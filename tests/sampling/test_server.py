import asyncio
import errno
import os
import signal
import socket
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from cua_rl.command_line.fields import with_values
from cua_rl.recipes.serve_tinker import Opened
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.sampling.vllm_command import Platform, vllm_command, vllm_environment, vllm_options
from cua_rl.types.errors import ConfigError, SamplingError
from cua_rl.types.rollout import AdapterRef, SamplingParams
from tests.live_processes import command_line
from tests.patience import patience
from tests.sampling.fake_vllm import fake_command


def make_server(folder: Path, tmp_path: Path, **options: Any) -> VllmServer:
    command = fake_command(folder, options.pop("dies_once_at", None))
    config = ServerConfig(model_path=folder, start_timeout_s=patience(60), port=options.pop("port", None))
    return VllmServer(config, tmp_path / "server.log", make_command=command, backoff_s=0.05, **options)


def server_pids(port: str) -> list[int]:
    processes = psutil.Process().children(recursive=True)
    lines = {process.pid: command_line(process) for process in processes}
    return [pid for pid, words in lines.items() if port in words and "guard" not in words[1]]


async def test_a_server_dying_under_a_request_costs_no_turn_and_counts_none_twice(
    folder: Path, renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    async with (
        make_server(folder, tmp_path, dies_once_at=tmp_path / "died") as server,
        SamplingClient(server) as client,
    ):
        gateway = Gateway(client, renderer, SamplingParams(max_tokens=16, temperature=1.0))
        await client.publish(AdapterRef(path=tmp_path, policy_version=3))
        for index in range(4):
            gateway.open_rollout(str(index))
        asked = [gateway.openai_client(str(index)).responses.create(model="policy", input="hi") for index in range(4)]
        answers = await asyncio.gather(*asked)
        turns = [gateway.close_rollout(str(index)) for index in range(4)]
    assert server.num_restarts == 1
    assert [answer.output_text for answer in answers] == ["done"] * 4
    assert [[turn.policy_version for turn in of_rollout] for of_rollout in turns] == [[3]] * 4


async def test_a_server_that_keeps_dying_is_given_up(folder: Path, tmp_path: Path) -> None:
    async with make_server(folder, tmp_path, max_restarts=1) as server, SamplingClient(server) as client:
        port = server.base_url.rpartition(":")[2]
        os.kill(server_pids(port)[0], signal.SIGKILL)
        while server.num_restarts == 0 or not server_pids(port):
            await asyncio.sleep(0.05)
        await server.wait_until_ready()
        os.kill(server_pids(port)[0], signal.SIGKILL)
        with pytest.raises(SamplingError, match="died 2 times"):
            await ask_until_it_fails(client)


async def test_a_service_without_any_model_server_left_ends_and_says_why(folder: Path, tmp_path: Path) -> None:
    async with make_server(folder, tmp_path, max_restarts=0) as server, SamplingClient(server) as client:
        unused: Any = None
        working: Any = asyncio.create_task(asyncio.Event().wait())
        opened = Opened(service=unused, trainer=unused, sampler=client, working=working)
        serving = asyncio.create_task(opened.end())
        await asyncio.sleep(0)
        assert not serving.done()
        os.kill(server_pids(server.base_url.removeprefix("unix:"))[0], signal.SIGKILL)
        with pytest.raises(SamplingError, match="given up"):
            await ask_until_it_fails(client)
        with pytest.raises(SamplingError, match="died 1 times, the last time with status 137, and is given up"):
            await serving
        working.cancel()


async def test_a_server_that_has_served_for_a_while_between_its_deaths_is_not_given_up(
    folder: Path, tmp_path: Path
) -> None:
    async with make_server(folder, tmp_path, max_restarts=1, steady_s=0.0) as server:
        for num_deaths in (1, 2, 3):
            os.kill(server_pids(server.base_url.removeprefix("unix:"))[0], signal.SIGKILL)
            while server.num_restarts < num_deaths:
                await asyncio.sleep(0.05)
            await server.wait_until_ready()


async def ask_until_it_fails(client: SamplingClient) -> None:
    while True:
        await client.respond("/v1/responses", {"input": "hi", "max_output_tokens": 4})
        await asyncio.sleep(0.05)


async def test_a_restart_that_the_machine_refuses_is_tried_again_until_the_server_is_given_up(
    folder: Path, tmp_path: Path
) -> None:
    starts = count()

    def command(config: ServerConfig, base_url: str) -> list[str]:
        if next(starts):
            raise OSError(errno.EMFILE, "Too many open files")
        return fake_command(folder)(config, base_url)

    config = ServerConfig(model_path=folder, start_timeout_s=patience(60))
    log_path = tmp_path / "server.log"
    async with VllmServer(config, log_path, make_command=command, max_restarts=2, backoff_s=0.01) as server:
        os.kill(server_pids(server.base_url.removeprefix("unix:"))[0], signal.SIGKILL)
        with pytest.raises(SamplingError, match="died 3 times"):
            await wait_until_it_fails(server)


async def wait_until_it_fails(server: VllmServer) -> None:
    async with asyncio.timeout(patience(10.0)):
        while True:
            await server.wait_until_ready()
            await asyncio.sleep(0.02)


async def test_leaving_ends_the_process(folder: Path, tmp_path: Path) -> None:
    async with make_server(folder, tmp_path) as server:
        port = server.base_url.rpartition(":")[2]
        assert server_pids(port)
    assert server_pids(port) == []


async def test_a_server_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="expected a tokenizer"):
        async with make_server(tmp_path / "no_such_folder", tmp_path):
            pass


async def test_a_port_in_use_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            async with make_server(folder, tmp_path, port=port):
                pass


def test_a_server_for_other_hosts_takes_adapters_over_http(folder: Path) -> None:
    config = ServerConfig(model_path=folder, host="10.0.0.5", port=8000, adapter_folder=Path("/adapters"))
    command = vllm_command(config, "http://10.0.0.5:8000")
    assert ("--middleware", "cua_rl.sampling.adapter_upload.AdapterUpload") in pairwise(command)
    assert ("--host", "10.0.0.5") in pairwise(command)
    assert vllm_environment(config, "key", folder)["CUA_RL_ADAPTER_FOLDER"] == "/adapters"


def test_the_command_serves_adapters_and_raw_answers(folder: Path) -> None:
    config = ServerConfig(model_path=folder, max_lora_rank=64, max_images=7, max_pixels=786432)
    command = vllm_command(config, "unix:/run/cua_rl/vllm.sock")
    options = dict(pairwise(command))
    assert "--enable-lora" in command
    assert options["--max-lora-rank"] == "64"
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--limit-mm-per-prompt"] == '{"image": 7, "video": 0}'
    assert options["--mm-processor-kwargs"] == '{"max_pixels": 786432}'
    assert not any("parser" in word for word in command)
    assert "--enable-tower-connector-lora" not in command
    assert "--enable-tower-connector-lora" in vllm_command(with_values(config, adapts_vision=True), "unix:/vllm.sock")
    assert options["--uds"] == "/run/cua_rl/vllm.sock"
    on_port = dict(pairwise(vllm_command(config, "http://127.0.0.1:1234")))
    assert (on_port["--host"], on_port["--port"]) == ("127.0.0.1", "1234")
    environment = vllm_environment(config, "key", folder, {"VLLM_USE_RUST_FRONTEND": "1"})
    assert environment["VLLM_USE_RUST_FRONTEND"] == "0"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    on_gpus = vllm_environment(ServerConfig(model_path=folder, gpu_names=("2", "3")), "key", folder)
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert on_gpus["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_server_makes_no_room_for_adapters_of_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe"}')
    config = ServerConfig(model_path=tmp_path)
    attention = ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"]

    assert vllm_options(config, "unix:/vllm.sock", "cuda")[-5:] == attention


IMAGE_CACHE = ("--mm-processor-cache-gb", "4.00")


def test_logits_in_half_precision_are_computed_in_float32(folder: Path) -> None:
    def head(platform: Platform, dtype: Literal["auto", "float32", "bfloat16"]) -> str | None:
        options = vllm_options(ServerConfig(model_path=folder, dtype=dtype), "unix:/vllm.sock", platform)
        return dict(pairwise(options)).get("--hf-overrides")

    assert head("cuda", "auto") == head("cuda", "bfloat16") == head("cpu", "bfloat16") == '{"head_dtype": "float32"}'
    assert head("cuda", "float32") is head("cpu", "auto") is None


def test_the_options_of_the_run_count_more_than_those_of_the_user(folder: Path) -> None:
    config = ServerConfig(model_path=folder, vllm_args="--block-size 32 --max-num-seqs 1")

    options = vllm_options(config, "unix:/vllm.sock", "cuda")

    assert options[:7] == [str(folder), *IMAGE_CACHE, "--block-size", "32", "--max-num-seqs", "1"]
    assert options[7:].count("--max-num-seqs") == 1


def test_the_planned_image_cache_gives_way_to_the_users(folder: Path) -> None:
    by_hand = "--mm-processor-cache-gb 20"

    options = vllm_options(
        ServerConfig(model_path=folder, image_cache_gib=7.5, vllm_args=by_hand), "unix:/vllm.sock", "cuda"
    )

    assert options[1:5] == ["--mm-processor-cache-gb", "7.50", *by_hand.split()]
