"""Nobody but the run reaches the model server."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cua_rl.host.users import GUEST_UIDS, can_change_user, claim_user
from cua_rl.sampling.address import server_client, split_address
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.sampling.vllm_access import RequireKey
from cua_rl.sampling.vllm_command import vllm_command, vllm_environment
from tests.patience import patience
from tests.sampling.fake_vllm import fake_command

CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
"""


def make_server(folder: Path, tmp_path: Path, port: int | None = None) -> VllmServer:
    config = ServerConfig(model_path=folder, start_timeout_s=patience(60), port=port)
    return VllmServer(config, tmp_path / "server.log", make_command=fake_command(folder))


async def test_a_server_of_the_run_listens_on_a_socket_and_asks_for_its_key(folder: Path, tmp_path: Path) -> None:
    async with make_server(folder, tmp_path) as server, SamplingClient(server) as client:
        await client.respond("/v1/responses", {"input": "hi", "max_output_tokens": 4})
        for key in (None, "wrong"):
            async with server_client(server.base_url, key) as stranger:
                for path in ("/health", "/metrics", "/v1/models", "/tokenize", "/no-such-path"):
                    assert (await stranger.get(path)).status_code == 401
                assert (await stranger.post("/v1/load_lora_adapter", content=b"[" * 1_000_000)).status_code == 401
                assert (await stranger.options("/v1/models")).status_code == 401
        _, path = split_address(server.base_url)
        assert path is not None
        assert Path(path).parent.stat().st_mode & 0o077 == 0
    assert not Path(path).parent.exists()


@pytest.mark.skipif(not can_change_user(), reason="not root: only root can try it as another user")
async def test_another_user_cannot_connect_to_the_model_server(folder: Path, tmp_path: Path) -> None:
    async with make_server(folder, tmp_path) as server:
        path = server.base_url.removeprefix("unix:")
        with await asyncio.to_thread(claim_user, GUEST_UIDS) as other:
            command = other.command([sys.executable, "-I", "-c", CONNECT, path])
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd="/")
    assert "PermissionError" in done.stderr


async def test_a_server_on_a_port_asks_for_its_key_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-user")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with make_server(folder, tmp_path, port) as server:
        async with server_client(server.base_url, None) as stranger:
            assert (await stranger.get("/metrics")).status_code == 401
        async with ExternalServer(f"{server.base_url}/v1") as same, SamplingClient(same) as client:
            await client.respond("/v1/responses", {"input": "hi", "max_output_tokens": 4})


async def test_a_socket_without_a_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    sent: list[Mapping[str, Any]] = []

    async def app(*_: object) -> None:
        raise AssertionError("it got through")

    async def receive() -> Mapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    await RequireKey(app)({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)

    assert [message["type"] for message in sent] == ["websocket.close"]


def test_its_environment_has_no_secret_but_its_key_and_its_command_has_none(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": "s", "WANDB_API_KEY": "s", "DATABASE_URL": "s", "OPENAI_API_KEY": "s", "GBOX_API_KEY": "s",
        "AWS_SECRET_ACCESS_KEY": "s", "MONITOR_READ_TOKEN": "s", "PGPASSWORD": "s", "VLLM_S3_SECRET": "s",
        "HF_HUB_TOKEN": "s", "HTTPS_PROXY": "s",
    }  # fmt: skip
    ours = {"PATH": "/bin", "HOME": "/home/me", "CUDA_HOME": "/cuda", "LD_LIBRARY_PATH": "/lib", "NCCL_DEBUG": "INFO"}
    config = ServerConfig(model_path=tmp_path)

    environment = vllm_environment(config, "key", tmp_path, secrets | ours)

    assert not secrets.keys() & environment.keys()
    assert ours.items() <= environment.items()
    assert environment["VLLM_API_KEY"] == "key"
    assert "key" not in vllm_command(config, "unix:/run/vllm.sock")
    hub = ServerConfig(model_path=Path("Qwen/Qwen3-VL-4B-Instruct"))
    downloading = vllm_environment(hub, "key", tmp_path, secrets | ours)
    assert secrets.keys() & downloading.keys() == {"HF_TOKEN", "HTTPS_PROXY"}
