"""Adapters that travel to a server without a shared file system."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import free_port
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.adapter_upload import ADAPTER_FILES, UPLOAD_FOLDER_VARIABLE, UPLOAD_PATH, AdapterUpload
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer
from cua_rl.sampling.vllm_responses import RESPONSES_PATH
from cua_rl.types.errors import AdapterError, SamplingError
from cua_rl.types.rollout import AdapterRef
from tests.sampling.fake_vllm import FakeVllm

KEY = {"Authorization": "Bearer of-the-server"}


@pytest_asyncio.fixture
async def served(
    renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[str, FakeVllm, Path]]:
    folder = tmp_path / "there"
    monkeypatch.setenv(UPLOAD_FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    fake = FakeVllm(renderer)
    async with serve_app(AdapterUpload(fake.app()), "127.0.0.1", 0, grace_s=0) as url:
        yield url, fake, folder


def make_adapter(folder: Path, version: int) -> AdapterRef:
    folder.mkdir()
    for file in ADAPTER_FILES:
        (folder / file).write_bytes(f"{file} {version}".encode() * 100_000)
    return AdapterRef(path=folder, policy_version=version)


async def test_an_adapter_is_sent_before_it_is_loaded_and_removed_after_it_is_unloaded(
    served: tuple[str, FakeVllm, Path], tmp_path: Path
) -> None:
    url, fake, folder = served
    first, second = (make_adapter(tmp_path / str(version), version) for version in (1, 2))
    async with ExternalServer(url) as server, SamplingClient(server, namespace="run") as client:
        await client.publish(first)
        arrived = folder / "policy-000001-run"
        assert fake.adapters == {"policy-000001-run": str(arrived)}
        assert [(arrived / file).read_bytes() for file in ADAPTER_FILES] == [
            (first.path / file).read_bytes() for file in ADAPTER_FILES
        ]
        await client.publish(second)
    assert [path.name for path in folder.iterdir()] == ["policy-000002-run"]


async def test_an_adapter_that_is_there_is_not_sent_again(served: tuple[str, FakeVllm, Path], tmp_path: Path) -> None:
    url, fake, _ = served
    adapter = make_adapter(tmp_path / "1", 1)
    async with ExternalServer(url) as server, SamplingClient(server, namespace="run") as client:
        await client.publish(adapter)
    for file in ADAPTER_FILES:
        (adapter.path / file).unlink()  # another process of the run, on another host, has no such files
    fake.adapters.clear()
    async with ExternalServer(url) as server, SamplingClient(server, namespace="run") as client:
        await client.publish(adapter)
    assert list(fake.adapters) == ["policy-000001-run"]


async def test_a_server_that_is_started_anew_with_another_folder_gets_the_adapter_again(
    renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    fake, port = FakeVllm(renderer), free_port()

    def serve(folder: Path) -> AbstractAsyncContextManager[str]:
        monkeypatch.setenv(UPLOAD_FOLDER_VARIABLE, str(folder))
        return serve_app(AdapterUpload(fake.app()), "127.0.0.1", port, grace_s=0)

    async with AsyncExitStack() as stack:
        async with serve(tmp_path / "before") as url:
            server = await stack.enter_async_context(ExternalServer(url))
            client = await stack.enter_async_context(SamplingClient(server, namespace="run"))
            await client.publish(make_adapter(tmp_path / "1", 1))
        fake.adapters.clear()
        async with serve(tmp_path / "after"):
            await client.respond(RESPONSES_PATH, {"input": "hi", "max_output_tokens": 8})
    assert fake.adapters == {"policy-000001-run": str(tmp_path / "after" / "policy-000001-run")}


async def test_a_client_without_the_files_waits_until_their_owner_sends_them_to_a_server_started_anew(
    renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    fake, port = FakeVllm(renderer), free_port()
    adapter = make_adapter(tmp_path / "1", 1)
    elsewhere = AdapterRef(path=tmp_path / "on-another-host" / "1", policy_version=1)

    def serve(folder: Path) -> AbstractAsyncContextManager[str]:
        monkeypatch.setenv(UPLOAD_FOLDER_VARIABLE, str(folder))
        return serve_app(AdapterUpload(fake.app()), "127.0.0.1", port, grace_s=0)

    async with AsyncExitStack() as stack:
        async with serve(tmp_path / "before") as url:
            server = await stack.enter_async_context(ExternalServer(url))
            owner = SamplingClient(server, namespace="run", check_interval_s=0.05)
            await stack.enter_async_context(owner)
            follower = SamplingClient(server, namespace="run", check_interval_s=0.05)
            await stack.enter_async_context(follower)
            await owner.publish(adapter)
            follower.follow(elsewhere)
            await follower.respond(RESPONSES_PATH, {"input": "hi", "max_output_tokens": 8})
        fake.adapters.clear()
        async with serve(tmp_path / "after"):
            _, used = await follower.respond(RESPONSES_PATH, {"input": "hi", "max_output_tokens": 8})
    assert used == elsewhere
    assert fake.adapters == {"policy-000001-run": str(tmp_path / "after" / "policy-000001-run")}


async def test_an_adapter_is_sent_again_to_a_server_that_was_away(
    renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    monkeypatch.setenv(UPLOAD_FOLDER_VARIABLE, str(tmp_path / "there"))
    fake, port = FakeVllm(renderer), free_port()

    def serve() -> AbstractAsyncContextManager[str]:
        return serve_app(AdapterUpload(fake.app()), "127.0.0.1", port, grace_s=0)

    async with AsyncExitStack() as stack:
        async with serve() as url:
            server = await stack.enter_async_context(ExternalServer(url))
            client = SamplingClient(server, namespace="run", check_interval_s=0.05)
            await stack.enter_async_context(client)
        publishing = asyncio.create_task(client.publish(make_adapter(tmp_path / "1", 1)))
        done, _ = await asyncio.wait([publishing], timeout=0.3)
        assert not done
        async with serve():
            await publishing
    assert list(fake.adapters) == ["policy-000001-run"]


async def test_an_adapter_that_is_nowhere_is_an_error(served: tuple[str, FakeVllm, Path], tmp_path: Path) -> None:
    async with ExternalServer(served[0]) as server, SamplingClient(server, namespace="run", max_attempts=2) as client:
        with pytest.raises(SamplingError, match=r"cannot send an adapter.*adapter_config\.json"):
            await client.publish(AdapterRef(path=tmp_path / "missing", policy_version=1))


async def test_a_server_without_room_refuses_the_adapter(
    served: tuple[str, FakeVllm, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, fake, folder = served
    monkeypatch.setattr("cua_rl.sampling.adapter_upload.MAX_BYTES", 1000)
    async with ExternalServer(url) as server, SamplingClient(server, namespace="run") as client:
        with pytest.raises(AdapterError, match="at most 1000 bytes"):
            await client.publish(make_adapter(tmp_path / "1", 1))
    assert not fake.adapters
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="others have no /dev/full")
async def test_a_server_whose_disk_is_full_says_so_with_its_folder(
    renderer: Qwen3VLRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "there"
    monkeypatch.setenv(UPLOAD_FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    monkeypatch.setattr("cua_rl.sampling.adapter_upload.token_hex", lambda _: "1")
    (folder / "policy-000001-run").mkdir(parents=True)
    (folder / "policy-000001-run" / "adapter_config.json.1.part").symlink_to("/dev/full")
    async with serve_app(AdapterUpload(FakeVllm(renderer).app()), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run") as client:
            with pytest.raises(AdapterError, match=f"507: disk full: expected room in '{folder}'"):
                await client.publish(make_adapter(tmp_path / "1", 1))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("PUT", f"{UPLOAD_PATH}/name/adapter_config.json", {}, 401),
        ("PUT", f"{UPLOAD_PATH}/name/adapter_config.json", {"Authorization": "Bearer wrong"}, 401),
        ("GET", UPLOAD_PATH, {}, 401),
        ("GET", f"{UPLOAD_PATH}/missing", KEY, 404),
        ("DELETE", f"{UPLOAD_PATH}/name", {}, 401),
        ("PUT", f"{UPLOAD_PATH}/name/other.py", KEY, 404),
        ("PUT", f"{UPLOAD_PATH}/%2e%2e/adapter_config.json", KEY, 404),
        ("PUT", f"{UPLOAD_PATH}/a%2fb/adapter_config.json", KEY, 404),
        ("DELETE", f"{UPLOAD_PATH}/..%2f..", KEY, 404),
        ("DELETE", f"{UPLOAD_PATH}/", KEY, 404),
        ("POST", f"{UPLOAD_PATH}/name/adapter_config.json", KEY, 404),
    ],
)
async def test_strangers_and_other_paths_are_refused(
    served: tuple[str, FakeVllm, Path], method: str, path: str, headers: dict[str, str], status: int
) -> None:
    url, _, folder = served
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        response = await client.request(method, path, headers=headers, content=b"x")
    assert response.status_code == status
    assert list(folder.rglob("*")) == []
