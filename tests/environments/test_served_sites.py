"""Servers of sites, without a browser: started, reset, used again, ended."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cua_rl.environments.browser.served_site import SiteServers, run_guest
from cua_rl.environments.browser.settings import SiteProgram
from cua_rl.environments.browser.site_network import open_site_network
from cua_rl.host.sandbox import can_sandbox
from cua_rl.types.errors import DeviceError
from tests.live_processes import kill, site_servers, stranger_connects
from tests.patience import IdleClock

SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        told = {"count": Handler.count, "uid": os.getuid(), "home": os.environ["HOME"], "names": sorted(os.environ)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())
    def do_POST(self):
        if self.path == "/reset":
            Handler.count = 0
        self.send_response(200 if self.path == "/reset" else 404)
        self.end_headers()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "server.py").write_text(SERVER)
        yield folder


def site(folder: Path, **given: str | None) -> SiteProgram:
    return SiteProgram(
        command=f"{sys.executable} server.py {{port}}", folder=folder, **{"reset": "POST /reset"} | given
    )


async def ask(url: str) -> dict[str, object]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(url)).json()


async def test_a_server_is_reset_before_it_is_used_again_and_ends_with_the_run(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder))
    assert (await ask(first.url))["count"] == 2  # the first request waited for the start
    await first.release()
    again = await servers.take(site(folder))
    assert again is first
    assert (await ask(again.url))["count"] == 1

    other = await servers.take(site(folder))
    assert other.port != first.port
    assert len(site_servers(folder)) >= 2
    await servers.close()
    assert site_servers(folder) == []


@pytest.mark.skipif(not can_sandbox(), reason="the kernel permits no namespaces")
async def test_sites_have_a_network_of_their_own_with_their_resets_and_checks(folder: Path) -> None:
    ask_site = "import os, urllib.request\nprint(urllib.request.urlopen(os.environ['CUA_SITE_URL']).status)"
    async with open_site_network() as network:
        servers = SiteServers(network)
        first = await servers.take(site(folder))
        with pytest.raises(httpx.ConnectError):
            await ask(first.url)
        assert not stranger_connects(first.port)
        told = {"CUA_SITE_URL": first.url}
        assert (await run_guest((sys.executable, "-c", ask_site), folder, told))[0] != 0
        assert await run_guest((sys.executable, "-c", ask_site), folder, told, network.inside) == (0, "200\n")
        await first.release()
        assert await servers.take(site(folder)) is first
        async with network.client() as client:
            assert (await client.get(first.url)).json()["count"] == 1
        await servers.close()


async def test_a_server_on_all_addresses_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    servers = SiteServers()
    await servers.take(site(folder))
    assert "expected a server only on 127.0.0.1" not in caplog.text
    (folder / "server.py").write_text(SERVER.replace('"127.0.0.1"', '"0.0.0.0"'))
    open_one = await servers.start(site(folder))
    assert f"got one on all addresses (0.0.0.0:{open_one.port})" in caplog.text
    await servers.close()


async def test_sites_whose_pages_request_other_addresses_stay_on_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    async with open_site_network(("https://fonts.example/",)) as network:
        assert network.inside == ()
    assert "other users of the machine can reach the sites" in caplog.text


async def test_without_a_reset_every_rollout_gets_a_new_server(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder, reset=None))
    await first.release()
    assert site_servers(folder) == []
    second = await servers.take(site(folder, reset=None))
    assert (await ask(second.url))["count"] == 2
    await servers.close()


async def test_an_idle_server_of_another_site_makes_room(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder))
    await first.release()
    second = await servers.take(site(folder, reset="POST /reset?other"))
    assert not first.process.is_running
    assert second.process.is_running
    await servers.close()


async def test_a_server_knows_nothing_of_our_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of our own")
    servers = SiteServers()
    told = await ask((await servers.take(site(folder))).url)
    await servers.close()
    assert "OPENAI_API_KEY" not in told["names"]  # pyright: ignore[reportOperatorIssue]
    assert told["home"] != os.environ["HOME"]
    assert not Path(str(told["home"])).exists()


async def test_what_cannot_start_or_be_reset_says_what_it_printed(folder: Path) -> None:
    servers = SiteServers()
    (folder / "broken.py").write_text("raise SystemExit('no database here')")
    broken = SiteProgram(command=f"{sys.executable} broken.py {{port}}", folder=folder)
    with pytest.raises(DeviceError, match="no database here"):
        await servers.take(broken)

    for reset, complaint in (
        ("POST /nowhere", "it answered 404"),
        (f"{sys.executable} broken.py", "status 1: no database here"),
    ):
        await (await servers.take(site(folder, reset=reset))).release()
        with pytest.raises(DeviceError, match=complaint):
            await servers.take(site(folder, reset=reset))
    assert site_servers(folder) == []


async def test_a_reset_may_be_a_command_that_is_told_the_address(folder: Path) -> None:
    (folder / "reset.py").write_text(
        "import sys, urllib.request\n"
        "urllib.request.urlopen(urllib.request.Request(sys.argv[1] + '/reset', method='POST'))\n"
    )
    servers = SiteServers()
    program = site(folder, reset=f"{sys.executable} reset.py {{url}}")
    first = await servers.take(program)
    await ask(first.url)
    await first.release()
    assert (await ask((await servers.take(program)).url))["count"] == 1
    await servers.close()


async def test_a_server_that_died_is_not_lent_again(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder))
    kill(site_servers(folder))
    await first.process.wait()
    with pytest.raises(DeviceError, match="expected the site to run until the rollout ends"):
        first.require_running()
    await first.release()
    assert (await servers.take(site(folder))) is not first
    await servers.close()


async def test_a_server_that_died_while_nobody_used_it_is_replaced(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder))
    await first.release()
    kill(site_servers(folder))
    await first.process.wait()
    second = await servers.take(site(folder))
    assert second.process.is_running
    assert (await ask(second.url))["count"] == 2
    await servers.close()


async def test_a_server_that_a_page_may_still_change_is_not_lent_again(folder: Path) -> None:
    servers = SiteServers()
    first = await servers.take(site(folder))
    await first.release(is_clean=False)
    assert not first.process.is_running
    assert site_servers(folder) == []
    assert (await servers.take(site(folder))) is not first
    await servers.close()


async def test_a_program_that_hangs_ends_when_it_is_cancelled(folder: Path) -> None:
    (folder / "server.py").write_text("import time; time.sleep(100)")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await run_guest((sys.executable, "server.py"), folder, {})
    assert site_servers(folder) == []


def test_servers_end_when_the_controller_is_killed(folder: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from cua_rl.environments.browser.served_site import SiteServers\n"
        "from cua_rl.environments.browser.settings import SiteProgram\n"
        "async def main():\n"
        "    await SiteServers().take(SiteProgram(command=sys.argv[1], folder=Path(sys.argv[2])))\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    arguments = [site(folder).command, str(folder)]
    controller = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    assert controller.stdout.readline() == "up\n"
    assert site_servers(folder)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()

    clock = IdleClock()
    while site_servers(folder):
        assert clock.look() < 20
        time.sleep(0.05)
