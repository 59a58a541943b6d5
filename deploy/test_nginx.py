"""deploy/nginx.conf under a real nginx, with a certificate of its own: what passes, and what does not."""

import asyncio
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import free_port
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.live import LiveFeed
from cua_rl.monitor.security import AccessRules
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from tests.sampling.fake_vllm import FakeVllm, RequireKey

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx: apt-get install nginx-light")

CONFIG = Path(__file__).with_name("nginx.conf")
WRITE_TOKEN, READ_TOKEN, SERVER_KEY = (f"a-long-{name}-token" for name in ("write", "read", "server"))
MAIN = """
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/cua_rl.conf;
}}
"""
# a run verifies certificates as it does outside of tests: by what SSL_CERT_FILE holds when it starts
CLIENT = """
import asyncio, sys
from cua_rl.sampling.server import ExternalServer

async def main(model, key):
    async with ExternalServer(model, api_key=key) as server:
        print("found", server.model.name, server.model.version)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """Addresses of a running nginx, which has the certificate for `localhost`."""

    certificate: Path
    monitor: str
    model: str
    plain: str

    def client(self, base_url: str) -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=self.certificate)
        return httpx.AsyncClient(base_url=base_url, verify=context, trust_env=False, timeout=20.0)


async def store(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest_asyncio.fixture
async def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Proxy]:
    """nginx with this repository's servers behind it: monitor, and a model server's double."""
    monkeypatch.setenv("VLLM_API_KEY", SERVER_KEY)
    rules = AccessRules(write_token=WRITE_TOKEN, read_token=READ_TOKEN, is_https=True)
    monitor = guard(make_app(Databases([]), rules, feed=LiveFeed(), results_folder=tmp_path), rules)
    model = Starlette(routes=[Route("/upload", store, methods=["PUT"])])
    model.mount("/", FakeVllm(load_qwen3_vl(TINY_QWEN3_VL)).app())
    async with AsyncExitStack() as stack:
        behind = {
            8720: await stack.enter_async_context(serve_app(monitor, "127.0.0.1", 0, grace_s=0)),
            8000: await stack.enter_async_context(serve_app(RequireKey(model), "127.0.0.1", 0, grace_s=0)),
        }
        proxy, config = _configure(tmp_path, behind)
        nginx = await asyncio.create_subprocess_exec("nginx", "-c", str(config), "-g", "daemon off;")
        stack.push_async_callback(nginx.wait)
        stack.callback(nginx.terminate)
        await _wait_until_it_listens(proxy)
        yield proxy


def _configure(folder: Path, behind: dict[int, str]) -> tuple[Proxy, Path]:
    """The file of the repository with free ports, and one certificate; nothing else of it is changed."""
    key, certificate = folder / "cua_rl.key", folder / "cua_rl.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        [*command, "-addext", names, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    text = CONFIG.read_text(encoding="utf-8").replace("/etc/ssl/", f"{folder}/")
    for port, url in behind.items():
        text = text.replace(f"http://127.0.0.1:{port};", f"{url};")
    plain = free_port()
    text = text.replace("listen 80;", f"listen 127.0.0.1:{plain};")
    ports: list[int] = []

    def own_port(_: re.Match[str]) -> str:  # each of the two servers is the default one of its port
        ports.append(free_port())
        return f"listen 127.0.0.1:{ports[-1]} ssl;"

    text = re.sub(r"listen 443 ssl;", own_port, text)
    (folder / "cua_rl.conf").write_text(text, encoding="utf-8")
    config = folder / "nginx.conf"
    # its worker stores large bodies in our folder, which other users cannot enter
    user = "user root;" if os.geteuid() == 0 else ""
    config.write_text(MAIN.format(folder=folder, user=user), encoding="utf-8")
    monitor, model = (f"https://localhost:{port}" for port in ports)
    return Proxy(
        certificate=certificate,
        monitor=monitor,
        model=model,
        plain=f"http://127.0.0.1:{plain}",
    ), config


async def _wait_until_it_listens(proxy: Proxy) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                async with proxy.client(proxy.monitor) as client:
                    await client.get("/api/session")
                return
            except httpx.ConnectError:
                await asyncio.sleep(0.05)


async def test_the_monitor_is_shown_over_https_to_who_signs_in(proxy: Proxy) -> None:
    async with proxy.client(proxy.monitor) as client:
        page, stranger = await client.get("/"), await client.get("/api/runs")
        assert (page.status_code, stranger.status_code) == (200, 401)
        assert page.headers["strict-transport-security"] == "max-age=31536000"

        signed_in = await client.post("/api/session", json={"token": READ_TOKEN})
        cookie = signed_in.headers["set-cookie"]
        assert cookie.startswith("__Host-cua_rl_monitor_")
        assert "secure" in cookie.lower()
        assert (await client.get("/api/runs")).status_code == 200


async def test_live_events_pass_the_proxy_at_once(proxy: Proxy) -> None:
    headers = {"Authorization": f"Bearer {READ_TOKEN}"}
    async with proxy.client(proxy.monitor) as client, asyncio.timeout(5):  # a keep-alive would come after 15 s
        async with client.stream("GET", "/api/events", headers=headers) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    assert '"hello"' in line
                    break


async def test_a_page_of_another_site_cannot_use_the_session_for_a_verdict(proxy: Proxy) -> None:
    async with proxy.client(proxy.monitor) as client:
        await client.post("/api/session", json={"token": WRITE_TOKEN})
        verdict = {"success": True, "reason": "seen"}
        statuses = [
            (
                await client.post("/api/runs/1/rollouts/none/overrides", json=verdict, headers={"Origin": origin})
            ).status_code
            for origin in ("https://evil.example", proxy.monitor)
        ]
    assert statuses[0] == 403
    assert statuses[1] == 404  # our own page gets as far as the rollout, which does not exist


async def test_runs_reach_a_model_server_over_tls_with_a_private_authority(proxy: Proxy) -> None:
    def connect(certificate: str) -> subprocess.CompletedProcess[str]:
        arguments = [proxy.model, SERVER_KEY]
        environment = {"SSL_CERT_FILE": certificate, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(CONFIG.parents[1])}
        return subprocess.run(
            [sys.executable, "-c", CLIENT, *arguments], env=environment, capture_output=True, text=True, check=False
        )

    trusted = await asyncio.to_thread(connect, str(proxy.certificate))
    assert trusted.stdout.split("\n")[:1] == ["found base 0.32.0"], trusted.stderr
    untrusted = await asyncio.to_thread(connect, "/etc/ssl/certs/ca-certificates.crt")
    assert untrusted.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in untrusted.stderr


async def test_without_its_secret_no_server_answers_behind_the_proxy_either(proxy: Proxy) -> None:
    for url, method, path in (
        (proxy.model, "GET", "/v1/models"),
        (proxy.model, "GET", "/health"),
        (proxy.model, "POST", "/v1/load_lora_adapter"),
        (proxy.monitor, "GET", "/api/runs"),
    ):
        async with proxy.client(url) as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.request(method, path, json={}, headers=headers)).status_code == 401, path


async def test_bodies_as_large_as_ours_pass(proxy: Proxy) -> None:
    body = bytes(80 * 2**20)
    async with proxy.client(proxy.model) as client:
        answer = await client.put("/upload", content=body, headers={"Authorization": f"Bearer {SERVER_KEY}"})
    assert answer.text == str(len(body))
    batch = b'["' + bytes(60 * 2**20)
    async with proxy.client(proxy.monitor) as client:
        headers = {"Authorization": f"Bearer {WRITE_TOKEN}", "Content-Type": "application/json"}
        answer = await client.post("/api/ingest/batch", content=batch, headers=headers)
    # by the monitor, which here has no database for what runs send; nginx refuses with 413
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")


async def test_programs_that_leave_tls_out_get_no_answer(proxy: Proxy) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(proxy.plain, headers={"Host": "model.example.com"})


async def test_people_who_leave_tls_out_are_sent_to_it(proxy: Proxy) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{proxy.plain}/runs/1", headers={"Host": "monitor.example.com"})
        assert (answer.status_code, answer.headers["location"]) == (301, "https://monitor.example.com/runs/1")
        # nginx answers plain HTTP on a port of TLS by itself
        answer = await client.get(proxy.monitor.replace("https://localhost", "http://127.0.0.1"))
        assert answer.status_code == 400


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1.1"])
async def test_old_versions_of_tls_are_refused(proxy: Proxy, version: str) -> None:
    port = proxy.monitor.rpartition(":")[2]
    flag = {"TLSv1": "-tls1", "TLSv1.1": "-tls1_1"}[version]
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", flag, "-cipher", "ALL@SECLEVEL=0"]
    done = await asyncio.to_thread(subprocess.run, command, input=b"", capture_output=True, check=False, timeout=20)
    assert done.returncode != 0
    assert b"alert protocol version" in done.stderr
