"""Copies of a page with its site go on as the original would, in another page on another server."""

import json
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import httpx
import pytest

from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.page_copy import PageState
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, UserPages
from cua_rl.environments.browser.served_site import SiteServers
from cua_rl.environments.browser.settings import SiteProgram
from cua_rl.environments.device import CopiedDevice, Device
from cua_rl.environments.pool import open_pool
from cua_rl.environments.table import parse_sources
from cua_rl.host.scratch import scratch_folder
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import prepare, validate
from cua_rl.types.actions import Action, Button, Click, PressButton, TypeText
from cua_rl.types.errors import ConfigError, DeviceError
from tests.live_processes import site_servers
from tests.real.browser.test_served_sites import EXAMPLE, source

NUM_COPIES = 1000
WORLD = """
import hashlib, http.server, json, sys

world = {"turns": 0, "mark": "", "seen": []}

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *of): pass
    def answer(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(json.dumps(world).encode())
    def do_PUT(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/half":
            given.pop("mark")
        world.update(given)
        self.answer(b"")
    def do_POST(self):
        for act in json.loads(self.rfile.read(int(self.headers["Content-Length"]))):
            world["turns"] += 1
            world["mark"] = hashlib.sha256((world["mark"] + act).encode()).hexdigest()
            world["seen"] = [*world["seen"], world["mark"][:6]][-5:]
        self.answer(json.dumps(world).encode())

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BY_COMMAND = """
import os, sys, urllib.request
path, address = os.environ["CUA_STATE_PATH"], sys.argv[2] + "/state"
if sys.argv[1] == "save":
    open(path, "wb").write(urllib.request.urlopen(address).read())
else:
    urllib.request.urlopen(urllib.request.Request(address, open(path, "rb").read(), method="PUT"))
"""


MOVING = """
import http.server, json, sys, time, urllib.parse
from http.cookies import SimpleCookie

notes = []
TALL = "<div style='height: 1500px'>tall</div>"
FIELDS = "<input id=name onfocus='fetch(`/note`, {method: `POST`})'><button>Go</button>"

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *of): pass
    def answer(self, body, *headers):
        self.send_response(200)
        for name, value in (("Content-Length", str(len(body))), ("Content-Type", "text/html"), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/state":
            return self.answer(json.dumps(notes).encode())
        cookie = SimpleCookie(self.headers.get("Cookie", ""))
        number = int(cookie["cart"].value) if "cart" in cookie else 0
        added = [("Set-Cookie", f"cart={number + 1}")] if self.path.startswith("/add") else []
        body = {"/tall": TALL + FIELDS, "/cart": f"<p>cart {number}</p>"}.get(self.path, f"<p>{self.path}</p>" + FIELDS)
        self.answer(body.encode(), *added)
    def do_PUT(self):
        notes[:] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"")
    def do_POST(self):
        time.sleep(0.2)
        notes.append(len(notes))
        self.answer(b"")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read, with a program that is a world, and one that saves and loads it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "world.py").write_text(WORLD)
        (folder / "state.py").write_text(BY_COMMAND)
        (folder / "moving.py").write_text(MOVING)
        yield folder


def world(folder: Path, snapshot: str = "GET /state", restore: str = "PUT /state") -> SiteProgram:
    command = f"{sys.executable} world.py {{port}}"
    return SiteProgram(command=command, folder=folder, reset="", snapshot=snapshot, restore=restore)


def acts(random: Random) -> str:
    return json.dumps([random.choice("abc") for _ in range(random.randrange(1, 4))])


async def test_a_thousand_copies_of_a_world_go_on_as_the_original_and_leave_nothing_behind(folder: Path) -> None:
    random, servers = Random(0), SiteServers()
    original, copy = await servers.take(world(folder)), await servers.take(world(folder))
    left = {*scratch_folder().iterdir()}
    num_states = set[bytes]()
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(NUM_COPIES):
            await client.post(original.url, content=acts(random))
            state = await original.snapshot()
            await client.post(copy.url, content=acts(random))  # what its last user left
            await copy.restore(state)
            following = acts(random)
            expected = (await client.post(original.url, content=following)).content
            assert (await client.post(copy.url, content=following)).content == expected
            num_states.add(state)
    assert len(num_states) == NUM_COPIES
    assert {*scratch_folder().iterdir()} == left
    await servers.close()
    assert site_servers(folder) == []


async def test_a_state_is_saved_and_loaded_by_commands_too(folder: Path) -> None:
    servers = SiteServers()
    told = f"{sys.executable} state.py"
    program = world(folder, f"{told} save {{url}}", f"{told} load {{url}}")
    original, copy = await servers.take(program), await servers.take(program)
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(original.url, content='["a", "b"]')

    state = await original.snapshot()
    await copy.restore(state)

    assert json.loads(state)["turns"] == 2
    assert await copy.snapshot() == state
    await servers.close()


async def test_a_world_that_does_not_become_the_other_one_is_a_fault(folder: Path) -> None:
    servers = SiteServers()
    original, copy = await servers.take(world(folder)), await servers.take(world(folder, restore="PUT /half"))
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(original.url, content='["a"]')

    with pytest.raises(DeviceError, match="it gave another"):
        await copy.restore(await original.snapshot())
    await servers.close()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"snapshot": "GET /api/state"}, "expected snapshot and restore, or neither"),
        ({"snapshot": "GET /api/state", "restore": "PUT api/state"}, "expected restore as a request"),
        ({"site_command": None, "reset": None, "snapshot": "GET /a"}, "expected snapshot beside site_command"),
    ],
)
def test_what_cannot_copy_a_site_is_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_tasks(source(EXAMPLE, **given), seed=0, split="train", device=PAGE_BROWSER)


@pytest.fixture
def shop() -> Iterator[Path]:
    """A copy of the example that every user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        shutil.copytree(EXAMPLE, Path(name) / "shopping_list")
        yield Path(name) / "shopping_list"


ROWS = [Click(x=x, y=54 + 110 * row) for row in range(1, 6) for x in (76, 560, 796, 940)]
"""Buttons of every item: done, less, more, remove."""


def some_action(random: Random) -> Action:
    others = (Click(x=400, y=54), TypeText(text="Tea"), TypeText(text="x"), Click(x=950, y=54))
    return random.choice((*random.sample(ROWS, 3), *others, PressButton(button=Button.BACK)))


async def look(device: Device) -> tuple[str, str]:
    return (await device.observe()).sha256, await device.query("text")


async def test_copies_of_a_page_show_and_do_what_the_original_does(shop: Path) -> None:
    sources = source(shop, snapshot="GET /api/state", restore="PUT /api/state")
    template = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0]
    random, num_changes = Random(1), 0
    async with UserPages(parse_sources(sources)) as backend, open_pool(backend, max_devices=2) as pool:
        for number in range(8):
            task = template.make_task(number)
            async with pool.lease(task.device_request()) as original:
                await prepare(task, original)
                for _ in range(random.randrange(1, 5)):
                    await original.execute(some_action(random))
                assert isinstance(original, CopiedDevice)
                snapshot = pickle.loads(pickle.dumps(await original.snapshot()))
                following = [some_action(random) for _ in range(3)]
                async with pool.lease(task.device_request(snapshot=snapshot)) as copy:
                    assert await look(copy) == await look(original)
                    for action in following:
                        for one in (original, copy):
                            await one.execute(action)
                        assert await look(copy) == await look(original)
                    num_changes += (await look(copy))[0] != snapshot.screen.sha256
                    verdicts = [(await validate(task, one, None)).actual for one in (original, copy)]
                    assert verdicts[0] == verdicts[1]
    assert num_changes > 4
    assert site_servers(shop) == []


async def test_a_page_that_keeps_something_to_itself_is_no_copy_but_a_fault(shop: Path) -> None:
    page_file = shop / "index.html"
    hidden = "<script>addEventListener('click', () => document.body.dataset.clicks = 1)</script>"
    page_file.write_text(page_file.read_text() + hidden)
    sources = source(shop, snapshot="GET /api/state", restore="PUT /api/state")
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        page = await backend.make(task.device_request())
        await prepare(task, page)
        await page.execute(Click(x=500, y=700))
        assert isinstance(page, BrowserPage)
        snapshot = await page.snapshot()
        assert isinstance(snapshot.state, PageState)

        with pytest.raises(DeviceError, match="got one with other html"):
            await backend.make(task.device_request(snapshot=snapshot))
        await page.close()
    assert site_servers(shop) == []


@pytest.mark.parametrize(
    ("way", "click"),
    [
        (["/add?item=2", "/cart"], None),  # a cookie that loading the history changes again
        (["/Special:Search?q=1", "//evil.example/x", "/cart"], None),
        (["/one"], "#name"),  # the server hears of the focus
        (["/tall"], "button"),  # below what shows at first, and a press gives it a focus without a ring
    ],
)
async def test_a_copy_has_what_history_focus_and_mouse_change_again(
    folder: Path, way: list[str], click: str | None
) -> None:
    sources: dict[str, object] = {
        "source_type": "page",
        "pages": [
            {"task_id": "moving", "instruction": "Look.", "check": {"query": "title", "expected": ""}, "url": "/"}
        ],
        "site_command": f"{sys.executable} {folder}/moving.py {{port}}",
        "reset": "PUT /state",
        "snapshot": "GET /state",
        "restore": "PUT /state",
    }
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with UserPages(parse_sources(sources)) as backend:
        original = await backend.make(task.device_request())
        assert isinstance(original, BrowserPage)
        assert original.site is not None
        for address in way:
            await original.open_page(original.site.url.removesuffix("/") + address)
        if click is not None:
            place = await original.evaluate(
                "of => { const e = document.querySelector(of); e.scrollIntoView({ block: 'end' });"
                "const { x, y, width, height } = e.getBoundingClientRect();"
                "return [x + width / 2, y + height / 2]; }",
                click,
            )
            x, y = cast("list[float]", place)
            await original.execute(Click(x=round(x), y=round(y)))
        snapshot = await original.snapshot()
        copy = await backend.make(task.device_request(snapshot=snapshot))
        assert isinstance(copy, BrowserPage)

        again = await copy.snapshot()
        assert again.screen == snapshot.screen
        assert isinstance(again.state, PageState)
        assert isinstance(snapshot.state, PageState)
        assert snapshot.state.site == (b"[0]" if click == "#name" else b"[]")
        assert [(cookie["name"], cookie["value"]) for cookie in again.state.cookies] == [
            (cookie["name"], cookie["value"]) for cookie in snapshot.state.cookies
        ]
        assert replace(again.state, cookies=()) == replace(snapshot.state, cookies=())
        assert snapshot.state.addresses == ("/", *way)[-len(snapshot.state.addresses) :]
        await copy.close()
        await original.close()
