import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cua_rl.agent.device_step import perform
from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.host.scratch import remove_abandoned, scratch_folder
from cua_rl.host.users import GUEST_UIDS, can_change_user
from cua_rl.types.actions import (
    Button,
    Click,
    DoubleClick,
    Drag,
    MoveMouse,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
)
from cua_rl.types.errors import AbsentError, ConfigError, DeviceError, TaskError, UnusableError
from tests.live_processes import command_line
from tests.patience import IdleClock, patience

PAGE = """<!doctype html><title>Test</title><style>body { margin: 0; height: 2000px; }
 #field { position: absolute; left: 20px; top: 20px; width: 200px; height: 30px; }
 #pad { position: absolute; left: 20px; top: 100px; width: 200px; height: 100px; background: #ccc; }
 select { position: absolute; left: 250px; top: 20px; width: 120px; height: 30px; }
 a { position: absolute; left: 250px; top: 100px; }</style>
<input id=field><div id=pad></div><select id=list><option>red<option>green<option>blue</select>
<a id=out href="https://example.com/">out</a> <a id=on href="second.html" target=_blank style="top:150px">on</a>
<script>
 const pad = document.getElementById('pad'); window.log = [];
 for (const kind of ['click', 'dblclick', 'contextmenu', 'mousedown', 'mouseup', 'mousemove'])
   pad.addEventListener(kind, e => log.push(kind + ' ' + Math.round(e.clientX) + ' ' + Math.round(e.clientY)));
</script>"""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users, such as a browser's
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "first.html").write_text(PAGE)
        (folder / "second.html").write_text("<title>Second</title><p>arrived</p>")
        yield folder


def pages_of(folder: Path) -> BrowserPages:
    """Pages of 400 x 300 that may show what lies in the folder."""
    allowed = (f"{folder.as_uri()}/",)
    return BrowserPages(PageSettings(allowed_urls=allowed, viewport_width=400, viewport_height=300, scale=1.5))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pages(folder: Path) -> AsyncIterator[BrowserPages]:
    """One browser for all tests that do not kill it."""
    async with pages_of(folder) as backend:
        yield backend


@pytest_asyncio.fixture(loop_scope="module")
async def page(pages: BrowserPages, folder: Path) -> AsyncIterator[BrowserPage]:
    page = await pages.lend()
    await page.open_page((folder / "first.html").as_uri())
    yield page
    await page.close()


def at(x: int, y: int) -> dict[str, int]:
    """A place in CSS pixels, in pixels of the screenshot (scale 1.5)."""
    return {"x": round(x * 1.5), "y": round(y * 1.5)}


async def events(page: BrowserPage) -> str:
    return str(await page.evaluate("() => log.splice(0).join(', ')"))


async def test_a_screenshot_has_the_viewport_times_the_scale_and_is_the_same_twice(page: BrowserPage) -> None:
    first, second = await page.observe(), await page.observe()
    assert (first.width_px, first.height_px) == (600, 450)
    assert first.sha256 == second.sha256


async def test_mouse_actions_arrive_where_the_screenshot_shows_them(page: BrowserPage) -> None:
    await page.execute(Click(**at(100, 150)))
    assert "click 100 150" in await events(page)
    await page.execute(Drag(**at(30, 110), to_x=300, to_y=285))  # to 200, 190 in CSS pixels
    seen = await events(page)
    assert "mousedown 30 110" in seen
    assert "mouseup 200 190" in seen
    await page.execute(DoubleClick(**at(40, 120)))
    assert "dblclick 40 120" in await events(page)
    await page.execute(RightClick(**at(50, 130)))
    assert "contextmenu 50 130" in await events(page)
    await page.execute(MoveMouse(**at(60, 140)))
    assert await events(page) == "mousemove 60 140"


async def test_the_keyboard_types_and_knows_chords(page: BrowserPage) -> None:
    await page.execute(Click(**at(100, 35)))
    await page.execute(TypeText(text="Grüße, wörld"))
    assert await page.query("value:#field") == "Grüße, wörld"
    await page.execute(PressKey(keys=("ctrl", "a")))
    await page.execute(TypeText(text="x"))
    assert await page.query("value:#field") == "x"


async def test_the_wheel_scrolls_by_pixels_of_the_screenshot(page: BrowserPage) -> None:
    await page.execute(Scroll(x=10, y=10, down_px=300))
    assert await page.evaluate("() => window.scrollY") == 200


async def test_lists_of_options_open_inside_the_page_and_take_clicks(page: BrowserPage) -> None:
    closed = await page.observe()
    await page.execute(Click(**at(300, 35)))
    assert (await page.observe()).sha256 != closed.sha256
    await page.execute(Click(**at(280, 95)))  # the third row of about 19 px below y = 50
    assert await page.query("value:#list") == "blue"


async def test_a_page_that_would_leave_stays_and_the_request_is_counted(page: BrowserPage) -> None:
    before = page.url
    await page.execute(Click(**at(258, 108)))
    assert page.url == before
    assert page.num_blocked_requests == 1
    assert (
        await page.evaluate("() => fetch('https://example.com/x').then(() => 'through', () => 'blocked')") == "blocked"
    )
    assert page.num_blocked_requests == 2


async def test_a_page_of_files_gets_no_file_beside_its_site(pages: BrowserPages, folder: Path) -> None:
    outside = folder.parent / f"{folder.name} outside"
    outside.mkdir()
    (outside / "script.js").write_text("window.isOutside = true;")
    (outside / "page.html").write_text("<title>Outside</title>")
    (folder / "script.js").write_text("window.isInside = true;")
    (folder / "curious.html").write_text(
        f'<script src="script.js"></script><script src="{outside.as_uri()}/script.js"></script>'
        f'<a href="{outside.as_uri()}/page.html">out</a>'
    )
    page = await pages.lend()
    await page.open_page((folder / "curious.html").as_uri())
    assert await page.evaluate("() => [window.isInside, window.isOutside === undefined]") == [True, True]
    assert page.num_blocked_requests == 1
    await page.execute(Click(**at(12, 18)))
    assert page.url == (folder / "curious.html").as_uri()
    assert page.num_blocked_requests == 2
    await page.close()


async def test_links_to_new_windows_open_in_the_one_that_is_seen_and_are_waited_for(page: BrowserPage) -> None:
    await page.execute(Click(**at(258, 158)))
    assert await page.query("title") == "Second"
    assert "arrived" in await page.query("text")


async def test_queries_that_no_page_answers_are_faults_of_the_task(page: BrowserPage) -> None:
    for name in ("bogus", "value:#pad", "text:[[", "checked:["):  # no such query, property, selector
        with pytest.raises(TaskError) as raised:
            await page.query(name)
        assert not isinstance(raised.value, AbsentError)
    assert not page.is_broken


async def test_an_element_that_is_not_there_is_absent_wherever_the_policy_went(page: BrowserPage) -> None:
    await page.evaluate("() => document.querySelector('#field').remove()")
    for name in ("value:#field", "text:#field", "checked:#field"):
        with pytest.raises(AbsentError, match="#field"):
            await page.query(name)
    await page.execute(PressButton(button=Button.BACK))
    assert await page.query("url") == "about:blank"
    with pytest.raises(AbsentError):
        await page.query("value:#pad")
    assert await page.query("count:#pad") == "0"


async def test_dialogs_reloads_and_broken_scripts_do_not_keep_a_page_from_being_read(page: BrowserPage) -> None:
    await page.evaluate("() => { setTimeout(() => { alert('a'); confirm('b'); prompt('c'); }, 0); }")
    await page.execute(Click(**at(100, 150)))
    await page.evaluate("() => { window.close(); document.title = 'open'; }")
    assert await page.query("title") == "open"
    await page.evaluate("() => { window.MutationObserver = null; }")
    await page.execute(Click(**at(100, 150)))
    await page.evaluate("() => { setInterval(() => location.reload(), 30); }")
    for _ in range(5):
        assert await page.query("count:#pad") in ("0", "1")  # the page may just be loading


@pytest.mark.parametrize("script", ["while (true) {}", "alert(1); while (true) {}"])
async def test_a_page_that_an_action_makes_hang_is_unusable_and_not_broken_by_chance(folder: Path, script: str) -> None:
    allowed = (f"{folder.as_uri()}/",)
    settings = PageSettings(allowed_urls=allowed, viewport_width=400, viewport_height=300, operation_timeout_s=2.0)
    async with BrowserPages(settings) as backend:
        page = await backend.lend()
        await page.open_page((folder / "first.html").as_uri())
        await page.evaluate(f"() => pad.addEventListener('click', () => {{ {script} }})")
        step = await perform(page, Click(x=100, y=150))
        assert (step.is_last, step.after) == (True, None)
        with pytest.raises(UnusableError):
            await page.query("title")
        await page.close()
        again = await backend.lend()  # the browser is well
        await again.open_page((folder / "first.html").as_uri())
        assert await again.query("title") == "Test"
        await again.close()


async def test_pages_share_no_storage(pages: BrowserPages, folder: Path) -> None:
    one, other = await pages.lend(), await pages.lend()
    for page in (one, other):
        await page.open_page((folder / "first.html").as_uri())
    await one.evaluate("() => localStorage.setItem('a', '1')")
    assert await other.evaluate("() => localStorage.getItem('a')") is None
    assert pages.num_browsers_started == 1


async def test_a_page_that_was_given_back_does_nothing_more(page: BrowserPage) -> None:
    await page.close()
    await page.close()
    with pytest.raises(DeviceError, match="which was returned"):
        await page.observe()


async def test_a_browser_that_dies_is_a_device_error_and_the_next_page_has_a_new_one(folder: Path) -> None:
    others = browser_pids(scratch_folder())
    async with pages_of(folder) as pages:
        page = await pages.lend()
        for pid in set(browser_pids(scratch_folder())).difference(others):
            with suppress(ProcessLookupError):  # the end of a sandbox ends what is in it
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceError):
            await page.observe()
        await page.close()
        successor = await pages.lend()
        await successor.open_page((folder / "second.html").as_uri())
        assert await successor.query("title") == "Second"
        assert pages.num_browsers_started == 2


CHILD = """
import asyncio, sys
from cua_rl.environments.browser.backend import BrowserPages
from cua_rl.environments.browser.settings import PageSettings
from cua_rl.host.scratch import scratch_folder
async def main():
    async with BrowserPages(PageSettings(allowed_urls=("file:///nowhere/",))) as pages:
        await pages.lend()
        print(scratch_folder(), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_no_browser_outlives_the_process_that_owned_it(number: signal.Signals) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert child.stdout is not None
    folder = Path((await child.stdout.readline()).decode().strip())
    assert browser_pids(folder)
    child.send_signal(number)
    await child.wait()
    clock = IdleClock()
    while browser_pids(folder) and clock.look() < 60:
        await asyncio.sleep(0.1)
    assert browser_pids(folder) == []
    async with asyncio.timeout(patience(60)):
        while await asyncio.to_thread(folder.exists):  # as long as a guard is at work
            await asyncio.to_thread(remove_abandoned, folder.parent)
            await asyncio.sleep(0.1)


def browser_pids(folder: Path) -> list[int]:
    """Browsers whose profiles lie in a process's temporary folder."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"--user-data-dir={folder}/browser".encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


SECRETS = ("HF_TOKEN", "GBOX_API_KEY", "DATABASE_URL", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")


async def test_a_browser_listens_nowhere_and_knows_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    others = browser_pids(scratch_folder())
    async with pages_of(folder) as pages:
        page = await pages.lend()
        await page.open_page((folder / "first.html").as_uri())
        browsers = [psutil.Process(pid) for pid in set(browser_pids(scratch_folder())).difference(others)]
        programs = [one for one in browsers if "process_guard" not in " ".join(command_line(one))]
        assert programs
        for process in (*programs, *programs[0].children(recursive=True)):
            with suppress(
                psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError
            ):  # a browser's helpers come and go
                links = process.net_connections("inet")
                assert [link for link in links if link.status == psutil.CONN_LISTEN] == []
                assert not any(name in Path(f"/proc/{process.pid}/environ").read_text() for name in SECRETS)
        assert not any("--remote-debugging-port" in word for one in programs for word in command_line(one))
        for profile in scratch_folder().glob("browser*"):
            assert profile.stat().st_mode & 0o077 == 0


async def test_the_driver_of_browsers_holds_no_key_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-of-the-judge")
    others = psutil.Process().children()
    async with pages_of(folder) as pages:
        await pages.lend()
        drivers = [one for one in psutil.Process().children() if one not in others and "run-driver" in one.cmdline()]

        assert len(drivers) == 1
        assert "canary" not in str(drivers[0].environ())
        assert drivers[0].environ()["PW_LANG_NAME"] == "python"


@pytest.mark.skipif(not can_change_user(), reason="not root: only root can give a browser another user")
async def test_a_browser_started_by_root_has_a_user_of_its_own_and_no_capabilities(folder: Path) -> None:
    others, num_checked = browser_pids(scratch_folder()), 0
    async with pages_of(folder) as pages:
        await pages.lend()
        for pid in set(browser_pids(scratch_folder())).difference(others):
            process = psutil.Process(pid)
            if "process_guard" in " ".join(command_line(process)) or "bwrap" in command_line(process)[:1]:
                continue  # they only wait for it
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    lines = Path(f"/proc/{one.pid}/status").read_text().splitlines()
                    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                    assert one.uids().real in GUEST_UIDS
                    assert fields["Groups"].split() == []
                    assert fields["NoNewPrivs"] == "1"
                    if one == process:  # its children have those of a namespace of their own
                        capabilities = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
                        assert {fields[name] for name in capabilities} == {"0" * 16}
                        num_checked += 1
    assert num_checked


async def test_without_namespaces_a_browser_starts_without_its_sandbox_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = folder / "chromium"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--no-sandbox*) exec "{find_chromium()}" "$@";; esac\n'
        'echo "FATAL:zygote_host_impl_linux.cc No usable sandbox!" >&2; exit 1\n'
    )
    program.chmod(0o755)
    async with BrowserPages(pages_of(folder).settings, program=program) as pages:
        page = await pages.lend()
        await page.open_page((folder / "second.html").as_uri())
        assert await page.query("title") == "Second"
    assert "without Chromium's sandbox" in caplog.text


@pytest.mark.skipif(not can_change_user(), reason="not root: only root can give a browser another user")
async def test_pages_that_the_browsers_user_cannot_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that other users can read"):
        async with pages_of(tmp_path):
            pass
