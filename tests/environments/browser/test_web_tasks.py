"""Lists of tasks on web sites, what their pages may visit, and how polite they are; all without a browser."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.environments.browser.web.blocking import why_blocked
from cua_rl.environments.browser.web.politeness import Politeness, site_of
from cua_rl.environments.browser.web.recording import (
    Recording,
    Replay,
    asked_of,
    begin_recording,
    begins_at,
    read_recording,
    recording_name,
)
from cua_rl.environments.browser.web.tasks import WEB_BROWSER, WebTask
from cua_rl.environments.browser.web.visit import Visit, WebPlace
from cua_rl.environments.table import parse_sources
from cua_rl.host.http_server import serve_app
from cua_rl.task_loader import TaskSet, load_tasks
from cua_rl.types.errors import BlockedError, ConfigError, DeviceServiceError
from tests.jumping_time import run_jumping

LISTS = Path(__file__).parent / "web_lists"


def load(file: Path, **given: object) -> TaskSet:
    source = {"source_type": "web", "file_path": str(file), **given}
    return load_tasks(source, seed=0, split="train", device=WEB_BROWSER, has_judge=True)


def web_tasks(tasks: TaskSet) -> list[WebTask]:
    return [task for task in tasks.templates if isinstance(task, WebTask)]


def test_the_list_of_online_mind2web_is_read_as_published() -> None:
    first, second = web_tasks(load(LISTS / "online_mind2web.json"))
    assert first.task_id == "b7258ee05d75e6c50673a59914db412e_110325"
    assert first.instruction == "Find the opening hours of the reading room on Sundays."
    assert (first.place.url, first.place.hosts) == ("https://www.library.example/", ("library.example",))
    assert (first.difficulty, second.difficulty) == ("easy", "hard")
    assert (second.place.url, second.place.hosts) == ("https://shop.rain.co.uk/umbrellas?sort=price", ("rain.co.uk",))
    assert first.is_judged
    assert first.make_task(7).validate is None


def test_the_list_of_webvoyager_is_read_as_published() -> None:
    tasks = web_tasks(load(LISTS / "webvoyager.jsonl"))
    assert [task.task_id for task in tasks] == ["Tea House--0", "Tea House--1", "Trails--0"]
    assert tasks[1].instruction == "Put two packets of Assam into the basket."
    assert (tasks[2].place.url, tasks[2].place.hosts) == ("http://trails.example:8080/", ("trails.example:8080",))
    assert load(LISTS / "webvoyager.jsonl", tags=["trails.example"]).task_ids == ("Trails--0",)


def test_a_list_of_ones_own_has_addresses_and_instructions(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"url": "https://a.example/x", "instruction": "Look.", "difficulty": "hard"}]))
    (task,) = web_tasks(load(file, allowed_hosts=["cdn.example"], max_per_host=2, page_interval_ms=0, robots="ignore"))
    assert (task.task_id, task.difficulty) == ("mine/1", "hard")
    place = task.place
    assert (place.hosts, place.max_per_host, place.page_interval_s) == (("a.example", "cdn.example"), 2, 0.0)
    assert not place.obeys_robots


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("https://a.example", "https://a.example/"),
        ("https://a.example?q=tea", "https://a.example/?q=tea"),
        ("https://a.example#top", "https://a.example/#top"),
        ("https://a.example/x?", "https://a.example/x?"),
    ],
)
def test_an_address_without_a_path_gets_one_as_in_a_browser(url: str, opened: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps([{"url": url, "instruction": "Look."}]))

    assert [task.place.url for task in web_tasks(load(tmp_path / "mine.json"))] == [opened]


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ({"confirmed_task": "Look.", "website": "united"}, "expected website as an address with http://"),
        ({"ques": "Look.", "web": "ftp://a.example/"}, "expected web as an address with http://"),
        ({"ques": "", "web": "https://a.example/"}, "ques as text"),
        ({"question": "Look.", "website": "https://a.example/"}, "keys of a known list .* got question, website"),
        ({"confirmed_task": "Look.", "website": "https://a.example/", "level": "epic"}, "expected a known difficulty"),
        ("Look.", "as a dictionary such as"),
    ],
)
def test_a_task_that_cannot_be_begun_is_refused(task: object, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([task]))
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path / "list.json")


def test_a_source_that_cannot_work_is_refused(tmp_path: Path) -> None:
    file = LISTS / "webvoyager.jsonl"
    with pytest.raises(ConfigError, match="expected file_path beside source_type 'web'"):
        parse_sources({"source_type": "web"})
    with pytest.raises(ConfigError, match=r"expected a judge .*docs/judge\.md"):
        load_tasks({"source_type": "web", "file_path": str(file)}, seed=0, split="train", device=WEB_BROWSER)
    with pytest.raises(ConfigError, match=r"expected max_per_host pages to wait 30 s .* got 32 s"):
        load(file, page_interval_ms=8000)
    with pytest.raises(ConfigError, match="expected record or replay, got both"):
        load(file, record=str(tmp_path), replay=str(tmp_path))
    with pytest.raises(ConfigError, match=r"expected a recording with recording\.json in"):
        load(file, replay=str(tmp_path))


@pytest.mark.parametrize(
    ("url", "site"),
    [
        ("https://www.example.com/a?b", "example.com"),
        ("https://a.b.example.com:8443/", "example.com:8443"),
        ("https://news.bbc.co.uk/", "bbc.co.uk"),
        ("https://www.google.com.au/maps", "google.com.au"),
        ("https://t.co/x", "t.co"),
        ("http://co.uk/", "co.uk"),
        ("http://localhost:3000/", "localhost:3000"),
        ("http://10.0.0.7:80/", "10.0.0.7:80"),
        ("http://user:word@10.0.0.7/", "10.0.0.7"),
        ("http://[::1]:8000/", "[::1]:8000"),
    ],
)
def test_what_an_owner_registers_is_found_in_an_address(url: str, site: str) -> None:
    assert site_of(url) == site


@pytest.mark.parametrize(
    ("url", "is_blocked"),
    [
        ("https://www.library.example/", False),
        ("http://library.example/a", False),
        ("https://a.b-c.library.example/x.js", False),
        ("https://notlibrary.example/", True),
        ("https://library.example.evil.net/", True),
        ("https://library.example@evil.net/", True),
        ("https://evil.net/?u=https://library.example/", True),
        ("https://evil.net\\.library.example/", True),
        ("ftp://library.example/", True),
        ("file:///etc/passwd", True),
    ],
)
def test_a_rollout_may_visit_its_site_with_subdomains_and_nothing_else(url: str, is_blocked: bool) -> None:
    (task, _) = web_tasks(load(LISTS / "online_mind2web.json"))
    settings = PageSettings(allowed_urls=task.place.allowed_urls)
    assert (settings.blocked_urls.match(url) is not None) is is_blocked
    assert settings.reached_hosts == (
        *("library.example:80", "library.example:443", "*.library.example:80", "*.library.example:443"),
    )


NOTHING = {"title": "Umbrellas", "captcha": "", "widget": ""}


@pytest.mark.parametrize(
    ("status", "headers", "seen", "is_first", "reason"),
    [
        (200, {}, {}, True, None),
        (200, {}, {"widget": ".g-recaptcha"}, True, None),  # a form with a captcha beside it
        (200, {}, {"title": "Captcha explained"}, True, None),
        (403, {}, {}, False, None),  # what the agent asked for is forbidden
        (404, {}, {"title": "Not found"}, True, None),
        (503, {}, {}, False, None),
        (403, {}, {}, True, "status 403"),
        (503, {}, {}, True, "status 503"),
        (429, {}, {}, False, "status 429"),
        (403, {}, {"title": "Just a moment..."}, False, "a challenge .*Just a moment"),
        (503, {}, {"title": "DDoS-Guard"}, False, "a challenge"),
        (403, {}, {"title": "", "widget": "iframe[src*='hcaptcha.com']"}, False, "a challenge .*hcaptcha"),
        (403, {"cf-mitigated": "challenge"}, {}, False, "cf-mitigated"),
        (200, {}, {"captcha": "#px-captcha"}, False, "a captcha .#px-captcha"),
    ],
)
def test_what_turns_browsers_away_is_told_from_what_was_asked_for(
    status: int, headers: dict[str, str], seen: dict[str, str], is_first: bool, reason: str | None
) -> None:
    found = why_blocked(status, headers, NOTHING | seen, is_first=is_first)
    assert (found is None) == (reason is None)
    assert re.search(reason or "^$", found or "")


Answer = Callable[[Request], Response]


def robots_server(answer: Answer) -> Starlette:
    async def robots(request: Request) -> Response:
        return answer(request)

    return Starlette(routes=[Route("/robots.txt", robots)])


@pytest.mark.parametrize(
    ("text", "status", "allowed"),
    [
        ("User-agent: *\nDisallow: /private\n", 200, {"/": True, "/private/a": False, "/public": True}),
        ("User-agent: cua_rl\nDisallow: /\n\nUser-agent: *\nAllow: /\n", 200, {"/": False}),
        ("User-agent: other\nDisallow: /\n", 200, {"/": True}),
        ("", 200, {"/": True}),
        # examples of RFC 9309 (2.2.2, 2.2.3, 5.1 and 5.2), and what it says about lines that mean nothing
        (
            "User-agent: *\nDisallow: *.gif$\nDisallow: /example/\nAllow: /publications/\nDisallow: /*?q=\n",
            200,
            {"/a.gif": False, "/a.gif2": True, "/example/a": False, "/publications/a": True, "/find?p=1&q=2": True}
            | {"/find?q=2": False, "/example": True},
        ),
        (
            "User-Agent: *\nAllow: /example/page/\nDisallow: /example/page/disallowed.gif\n",
            200,
            {"/example/page/a": True, "/example/page/disallowed.gif": False},
        ),
        ("User-agent: *\nDisallow: /\nAllow: /public\n", 200, {"/": False, "/public/a": True}),
        ("User-agent: *\nDisallow: /a%3Cd.html\nDisallow: /%7Eb\n", 200, {"/a%3cd.html": False, "/~b": False}),
        ("\ufeffUser-agent: other\nUser-agent: CUA_RL # us\n\n# all\nDisallow: /a\n\n", 200, {"/a": False, "/b": True}),
        ("User-agent: cua_rl\nDisallow: /a\n\nUser-agent: cua_rl\nDisallow: /b\n", 200, {"/a": False, "/b": False}),
        ("User-agent: rl\nDisallow: /\nUser-agent: *\nDisallow:\n", 200, {"/": True}),
        ("not here", 404, {"/": True, "/private/a": True}),
    ],
)
async def test_robots_txt_says_what_programs_may_load(text: str, status: int, allowed: dict[str, bool]) -> None:
    asked: list[str] = []

    def answer(request: Request) -> Response:
        asked.append(request.headers["user-agent"])
        return PlainTextResponse(text, status_code=status)

    async with serve_app(robots_server(answer), "127.0.0.1", 0) as address:
        hosts = Politeness()
        found = await asyncio.gather(*(hosts.allows(f"{address}{path}") for path in allowed))
        assert dict(zip(allowed, found, strict=True)) == allowed
    assert asked == ["cua_rl"]  # each server is asked once


async def test_a_server_that_does_not_say_what_it_allows_is_a_fault_and_asked_again() -> None:
    statuses = [503, 429, 404]

    def answer(_: Request) -> Response:
        return PlainTextResponse("", status_code=statuses.pop(0))

    hosts = Politeness()
    async with serve_app(robots_server(answer), "127.0.0.1", 0) as address:
        for _ in range(2):
            with pytest.raises(DeviceServiceError, match=r"robots\.txt"):
                await hosts.allows(f"{address}/")
        assert await hosts.allows(f"{address}/")
    with pytest.raises(DeviceServiceError, match=r"fetch http://127\.0\.0\.1:9/robots\.txt"):
        await hosts.allows("http://127.0.0.1:9/")


def test_pages_of_one_site_are_loaded_one_after_another_and_others_meanwhile() -> None:
    loaded: list[tuple[str, float]] = []

    async def load_page(hosts: Politeness, url: str) -> None:
        await hosts.pace(url, 2.0)
        loaded.append((url, asyncio.get_running_loop().time()))

    async def work() -> None:
        hosts = Politeness()
        urls = ("http://a.example/1", "http://www.a.example/2", "http://b.example/1", "http://a.example/3")
        await asyncio.gather(*(load_page(hosts, url) for url in urls))
        await asyncio.sleep(10.0)
        await load_page(hosts, "http://a.example/4")

    run_jumping(work())
    assert loaded == [
        ("http://a.example/1", 0.0),
        ("http://b.example/1", 0.0),
        ("http://www.a.example/2", 2.0),
        ("http://a.example/3", 4.0),
        ("http://a.example/4", 14.0),
    ]


@pytest.mark.parametrize(
    ("delay", "num_places", "is_refused"), [("0.1", 4, False), ("10", 3, False), ("20", 1, False), ("31", 1, True)]
)
async def test_no_page_waits_longer_for_its_turn_than_for_a_document(
    delay: str, num_places: int, is_refused: bool
) -> None:
    text = f"User-agent: *\nDisallow: /no\nCrawl-delay: {delay}\n"
    async with serve_app(robots_server(lambda _: PlainTextResponse(text)), "127.0.0.1", 0) as address:
        hosts = Politeness()
        place = WebPlace(url=f"{address}/no", hosts=("127.0.0.1",))
        visits = [Visit(place, hosts, name=f"r{number}", replay=None) for number in range(5)]
        entering = [asyncio.create_task(visit.enter()) for visit in visits]
        await asyncio.gather(*entering[:num_places])
        assert [task.done() for task in entering].count(True) == num_places
        with pytest.raises(BlockedError, match="Crawl-delay of 31 s" if is_refused else "forbids"):
            await visits[0].begin(cast("BrowserPage", None))
        for task in entering:
            task.cancel()


async def test_the_pause_that_robots_txt_asks_for_is_kept_if_it_is_longer() -> None:
    text = "User-agent: *\nCrawl-delay: 30.5\n"
    async with serve_app(robots_server(lambda _: PlainTextResponse(text)), "127.0.0.1", 0) as address:
        hosts = Politeness()
        assert await hosts.allows(f"{address}/")
        await hosts.pace(f"{address}/", 0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hosts.pace(f"{address}/", 0.0), timeout=0.05)


def entry(
    method: str, url: str, *, status: int = 200, file: str | None = None, sent: str | None = None, to: str = ""
) -> dict[str, object]:
    """An entry of a HAR file as Playwright writes it."""
    content = {} if file is None else {"_file": file}
    response = {"status": status, "headers": [], "content": content, "redirectURL": to}
    return {"request": {"method": method, "url": url, "postData": {"text": sent or ""}}, "response": response}


def write_recording(folder: Path, rollouts: dict[str, list[dict[str, object]]]) -> Recording:
    begin_recording(folder)
    for name, entries in rollouts.items():
        (folder / name).write_text(json.dumps({"log": {"entries": entries}}))
    return read_recording(folder)


def ask(replay: Replay, method: str, url: str, body: bytes | None = None) -> str | None:
    answer = replay.answer(asked_of(method, url, body))
    return None if answer is None or answer.body is None else answer.body.name


LIST, ADD = "http://a.example/list", "http://a.example/add"


def test_what_was_sent_before_decides_what_is_answered(tmp_path: Path) -> None:
    def added(item: str) -> dict[str, object]:
        return entry("POST", ADD, file="ok", sent=item)

    def shown(file: str) -> dict[str, object]:
        return entry("GET", LIST, file=file)

    one = [shown("empty"), added("tea"), shown("tea")]
    other = [shown("empty"), added("jam"), shown("jam"), added("tea"), shown("jam, tea")]
    rollouts = {recording_name("task", 1, "x"): one, recording_name("task", 2, "y"): other}
    recording = write_recording(tmp_path, rollouts)
    assert begins_at(recording, LIST)
    assert begins_at(recording, f"{LIST}#top")
    assert not begins_at(recording, "http://a.example/")
    replay = Replay(recording, "task", 1)
    assert ask(replay, "GET", LIST) == "empty"
    assert ask(replay, "POST", ADD, b"jam") == "ok"  # only the other rollout did that
    assert ask(replay, "GET", LIST) == "jam"
    assert ask(replay, "POST", ADD, b"milk") is None  # none did
    assert ask(replay, "GET", LIST) == "jam"  # so the server has not seen it
    assert ask(replay, "POST", ADD, b"tea") == "ok"
    assert ask(replay, "GET", f"{LIST}#end") == "jam, tea"


def test_an_answer_that_changes_comes_in_its_order_and_the_last_one_stays(tmp_path: Path) -> None:
    entries = [entry("GET", LIST, file=name) for name in ("first", "second")]
    replay = Replay(write_recording(tmp_path, {recording_name("task", 0, "x"): entries}), "task", 0)
    assert [ask(replay, "GET", LIST) for _ in range(3)] == ["first", "second", "second"]


def test_the_recorded_rollout_of_the_same_task_and_seed_comes_first(tmp_path: Path) -> None:
    instances = (("other", 7), ("shop.1/tea", 1), ("shop.1/tea", 12), ("shop.1", 1))
    recording = write_recording(
        tmp_path,
        {recording_name(task, seed, "x"): [entry("GET", LIST, file=f"{seed} {len(task)}")] for task, seed in instances},
    )
    for task, seed in instances:
        assert ask(Replay(recording, task, seed), "GET", LIST) == f"{seed} {len(task)}"
    assert ask(Replay(recording, "shop.1/tea", 99), "GET", LIST) == "1 10"
    assert ask(Replay(recording, "a new task", 0), "GET", LIST) == "7 5"


def test_nothing_is_answered_with_what_was_not_answered_or_is_lost(tmp_path: Path) -> None:
    entries = [
        entry("GET", LIST, status=-1),  # blocked
        entry("GET", ADD),  # its body was not there any more when it was asked for
        entry("GET", f"{ADD}/old", status=302, to=LIST),
    ]
    replay = Replay(write_recording(tmp_path, {recording_name("task", 0, "x"): entries}), "task", 0)
    assert replay.answer(asked_of("GET", LIST, None)) is None
    assert replay.answer(asked_of("GET", ADD, None)) is None
    moved = replay.answer(asked_of("GET", f"{ADD}/old", None))
    assert moved is not None
    assert moved.redirect == LIST


def test_a_form_with_files_is_the_same_whatever_separates_its_parts() -> None:
    def body(boundary: str) -> bytes:
        return f"------WebKitFormBoundary{boundary}\r\nname\r\n------WebKitFormBoundary{boundary}--".encode()

    one, other = (asked_of("POST", ADD, body(boundary)) for boundary in ("0123456789abcdef", "ABCDEFGHIJKLMNOP"))
    assert one == other
    assert one != asked_of("POST", ADD, body("0123456789abcdef").replace(b"name", b"game"))


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    name = recording_name("task", 0, "x")
    with pytest.raises(ConfigError, match=f"expected a HAR file of a recording at .*{name}"):
        write_recording(tmp_path, {name: [{"request": {}}]})
