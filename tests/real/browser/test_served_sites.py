"""Sites with state in a real browser, a server per page: eight at a time, and nothing crosses."""

import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, UserPages
from cua_rl.environments.browser.served_site import ServedSite
from cua_rl.environments.pool import open_pool
from cua_rl.environments.table import parse_sources
from cua_rl.host.sandbox import can_sandbox
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import prepare, validate
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click, TypeText
from cua_rl.types.errors import ConfigError, DeviceError, TaskError
from cua_rl.types.judgement import Validation
from tests.live_processes import kill, site_servers, stranger_connects

EXAMPLE = Path(__file__).parents[3] / "examples" / "sites" / "shopping_list"
CALLS = "\n    with open(__file__ + '.calls', 'a') as calls:\n        print(url, file=calls)\n"
"""What the verifiers share notes its calls beside itself."""


@pytest.fixture
def site() -> Iterator[Path]:
    """A copy of the example that every user can read, and whose verifiers may note their calls."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shopping_list"
        Path(name).chmod(0o755)
        shutil.copytree(EXAMPLE, folder)
        shared = folder / "verifiers" / "site_state.py"
        shared.write_text(shared.read_text().replace('as wanted."""\n', f'as wanted."""{CALLS}'))
        noted = folder / "verifiers" / "site_state.py.calls"
        noted.touch()
        noted.chmod(0o666)  # checks that run at the same time have users of their own
        yield folder


def source(folder: Path, **given: object) -> dict[str, object]:
    command = f"{sys.executable} server.py --port {{port}}"
    return {
        "source_type": "page",
        "file_path": str(folder),
        "site_command": command,
        "reset": "POST /api/reset",
    } | given


def calls(folder: Path) -> list[str]:
    """The address that each call of `compare` was told."""
    return (folder / "verifiers" / "site_state.py.calls").read_text().splitlines()


async def buy(page: BrowserPage, name: str) -> None:
    """Add an item as an agent does."""
    await page.execute(Click(x=400, y=54))
    await page.execute(TypeText(text=name))
    await page.execute(Click(x=950, y=54))


async def test_eight_at_a_time_see_their_own_state_alone_and_are_checked_once_each(site: Path) -> None:
    sources = source(site)
    tasks = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER)
    (coffee,) = (template for template in tasks.templates if template.task_id == "shopping_list/add_coffee")
    ports: set[int] = set()

    async def work(number: int, all_are_here: asyncio.Barrier) -> Validation:
        """One buys coffee, the others something else, all at the same time."""
        task = coffee.make_task(number)
        async with pool.lease(task.device_request()) as page:
            await prepare(task, page)
            assert isinstance(page, BrowserPage)
            assert isinstance(page.site, ServedSite)
            ports.add(page.site.port)
            await all_are_here.wait()
            name = "Coffee" if number == 3 else f"Thing {number}"
            await buy(page, name)
            await all_are_here.wait()
            while f"{name} × 1" not in (text := await page.query("text")):  # the server may still be at work
                await asyncio.sleep(0.05)
            assert "Bread × 1" in text
            assert text.count("Remove") == 6  # five from the beginning, one of its own
            return await validate(task, page, None)

    async with UserPages(parse_sources(sources)) as backend, open_pool(backend, max_devices=8) as pool:
        for _ in range(2):
            barrier = asyncio.Barrier(8)
            found = await asyncio.gather(*(work(number, barrier) for number in range(8)))
            assert [validation.success for validation in found] == [number == 3 for number in range(8)]
            assert found[0].actual == "not as wanted: Coffee, Thing 0"
            assert found[0].score == pytest.approx(5 / 7)
        assert len(ports) == 8  # those of the first round were used again
        assert len(calls(site)) == 16
        assert len(set(calls(site))) == 8
        assert len(site_servers(site)) >= 8
    assert site_servers(site) == []


async def test_every_task_of_the_example_can_be_done_by_pixel(site: Path) -> None:
    def row(number: int) -> int:
        return 54 + 110 * (number + 1)

    done, more, remove = 76, 796, 940
    acts: dict[str, list[tuple[int, int]]] = {
        "tick_bread": [(done, row(0))],
        "more_eggs": [(more, row(1))] * 4,
        "clear_done": [(remove, row(4)), (remove, row(2))],
        "count_open": [],
    }
    sources = source(site)
    tasks = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER)
    async with UserPages(parse_sources(sources)) as backend:
        for template in tasks.templates:
            task = template.make_task(0)
            page = await backend.make(task.device_request())
            assert isinstance(page, BrowserPage)
            await prepare(task, page)
            assert not (await validate(task, page, "2")).success
            for x, y in acts.get(template.short_name, []):
                await page.execute(Click(x=x, y=y))
            if template.short_name == "add_coffee":
                await buy(page, "Coffee")
            assert (await validate(task, page, "There are 3.")).success, template.task_id
            await page.close()


async def test_a_page_reaches_no_other_site_and_a_site_that_dies_is_a_fault(site: Path) -> None:
    sources = source(site)
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page, other = [await backend.make(task.device_request()) for _ in range(2)]
        assert isinstance(page, BrowserPage)
        assert isinstance(other, BrowserPage)
        await prepare(task, page)
        assert isinstance(other.site, ServedSite)
        script = "url => fetch(url, { mode: 'no-cors' }).then(() => 'through', () => 'blocked')"
        assert await page.evaluate(script, f"{other.site.url}api/state") == "blocked"

        assert isinstance(page.site, ServedSite)
        port = page.site.port
        servers = [one for one in site_servers(site) if str(port) in one.info["cmdline"]]
        kill([one for one in servers if "process_guard.py" not in " ".join(one.info["cmdline"])])
        await page.site.process.wait()
        with pytest.raises(DeviceError, match="expected the site to run"):
            await validate(task, page, None)
        await page.close()
        await other.close()


@pytest.mark.skipif(not can_sandbox(), reason="the kernel permits no namespaces")
async def test_nobody_outside_finishes_the_task_of_a_rollout(site: Path) -> None:
    sources = source(site, task_names=["tick_bread"])
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page = await backend.make(task.device_request())
        assert isinstance(page, BrowserPage)
        await prepare(task, page)
        assert isinstance(page.site, ServedSite)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            assert stranger_connects(listening.getsockname()[1])
        assert not stranger_connects(page.site.port)
        assert await page.evaluate("() => navigator.onLine")
        assert not (await validate(task, page, None)).success
        await page.close()


REDIRECTING = """
import http.server, pathlib, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with pathlib.Path(__file__).with_name(f"hits.{sys.argv[1]}").open("a") as hits:
            print(self.path, file=hits)
        goes_on = self.path.startswith("/to/")
        self.send_response(307 if goes_on else 200)
        self.send_header("Content-Type", "text/html")
        if goes_on:
            self.send_header("Location", f"http://127.0.0.1:{self.path[4:]}")
        self.end_headers()
    do_POST = do_GET

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_neither_redirects_nor_sockets_lead_to_the_site_of_another_page(site: Path) -> None:
    site.chmod(0o777)
    (site / "server.py").write_text(REDIRECTING)
    sources = source(site, site_command=f"{sys.executable} server.py {{port}}", reset=None, task_names=["tick_bread"])
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page, other = [await backend.make(task.device_request()) for _ in range(2)]
        assert isinstance(page, BrowserPage)
        assert isinstance(other, BrowserPage)
        assert isinstance(page.site, ServedSite)
        assert isinstance(other.site, ServedSite)
        await prepare(task, page)
        way = f"/to/{other.site.port}"
        send = "given => fetch(given[0], { method: given[1], mode: 'no-cors' }).then(() => 'through', () => 'blocked')"
        assert await page.evaluate(send, [f"{way}/fetch", "GET"]) == "blocked"
        assert await page.evaluate(send, [f"{way}/post", "POST"]) == "blocked"
        open_socket = """url => new Promise(done => {
            const socket = new WebSocket(url)
            socket.onopen = socket.onerror = () => done(true)
        })"""
        await page.evaluate(open_socket, f"ws://127.0.0.1:{other.site.port}/socket")
        await page.evaluate(open_socket, f"ws://127.0.0.1:{page.site.port}/own-socket")
        await page.evaluate("way => { location.href = way }", f"{way}/visit")
        while f"{way}/visit" not in (own := (site / f"hits.{page.site.port}").read_text()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # for what should not happen
        assert "/own-socket" in own
        assert set((site / f"hits.{other.site.port}").read_text().split()) == {"/"}  # its start was waited for
        await page.close()
        await other.close()


async def test_a_site_that_does_not_start_ends_the_run_before_its_first_rollout(site: Path) -> None:
    (site / "server.py").write_text("raise SystemExit('the database is not here')")
    with pytest.raises(ConfigError, match=r"the database is not here; correct site_command"):
        async with UserPages(parse_sources(source(site))):
            pass


async def test_a_site_that_the_agent_crashed_is_not_done(site: Path) -> None:
    (site / "crashing.py").write_text(CRASHING)
    sources = source(site, site_command=f"{sys.executable} crashing.py {{port}}", reset=None)
    sources = {key: value for key, value in sources.items() if value is not None}
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page = await backend.make(task.device_request())
        assert isinstance(page, BrowserPage)
        assert isinstance(page.site, ServedSite)
        with pytest.raises(DeviceError):
            await page.open_page(f"{page.site.url}crash")
        await page.site.process.wait()
        found = await validate(task, page, None)
        assert not found.success
        assert "ended with status 3" in found.actual
        await page.close()


CRASHING = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os._exit(3)
        self.send_response(200)
        self.end_headers()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_check_that_fails_itself_is_no_reward(site: Path) -> None:
    (site / "verifiers" / "tick_bread.py").write_text("def verify(url):\n    raise OSError('no route')\n")
    sources = source(site, task_names=["tick_bread"])
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page = await backend.make(task.device_request())
        await prepare(task, page)
        with pytest.raises(TaskError, match="no route"):
            await partial(validate, task, page)(None)
        await page.close()


async def test_pages_that_we_do_not_serve_are_checked_by_programs_too(site: Path) -> None:
    check = {"command": f"{sys.executable} -c \"import os; print('true' if '{{url}}' == 'http://127.0.0.1:9' else 1)\""}
    task = {"url": "http://127.0.0.1:9/shop", "instruction": "Look.", "check": check}
    sources: dict[str, object] = {"source_type": "page", "pages": [task]}
    made: Task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page = await backend.make(made.device_request())
        assert (await validate(made, page, "yes")).success
        await page.close()
