"""The keyboard's focus where what had it is taken away: it goes on from there, not from the beginning of the page."""

import pytest

from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, finished, remove, step

pytestmark = pytest.mark.asyncio(loop_scope="session")
FOCUSED = "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent).trim()"


async def _sign_in(window: Window) -> None:
    answer = await window.page.request.post(f"{window.site.base_url}/api/session", data={"token": WRITE_TOKEN})
    assert answer.ok


async def _push(window: Window, name: str, then: str) -> None:
    """Push a button with the keyboard; wait until this one has the focus."""
    button = window.page.get_by_role("button", name=name, exact=True)
    await button.focus()
    await window.page.keyboard.press("Enter")
    await window.page.wait_for_function(f"wanted => {FOCUSED} === wanted", arg=then)


async def test_the_focus_goes_on_to_the_next_tag_or_note_and_at_last_to_what_adds_them(window: Window) -> None:
    page = window.page
    run = await add_run(window.site.database_url, begin("focused"), *step(1, prefix="focused"), finished())
    (rollout, *_) = (await window.json(f"/api/rollouts?run_id={run}&status=completed"))["items"]
    await _sign_in(window)
    for place in ({}, {"rollout_id": rollout["rollout_id"]}):
        for part in ({"tag": "one"}, {"tag": "two"}, {"text": "Wrong."}):
            body = {**place, **part, "actor": "Ada"}
            assert (await page.request.post(f"{window.site.base_url}/api/runs/{run}/notes", data=body)).ok
    for path in (f"/runs/{run}", f"/runs/{run}/rollouts/{rollout['rollout_id']}"):
        await window.open(path)
        for name, then in (
            ("Remove the tag one", "Remove the tag two"),
            ("Remove the tag two", "Remove the note"),
            ("Remove the note", "Note"),
        ):
            await _push(window, name, "Remove")
            await page.keyboard.press("Enter")
            await page.wait_for_function(f"wanted => {FOCUSED} === wanted", arg=then)
    await remove(window, [run])


async def test_the_focus_stays_with_a_pin_and_near_a_query_that_is_deleted(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await _sign_in(window)
    await window.open("/?q=first")
    pin = page.get_by_role("button", name="Pin first")
    await pin.focus()
    for pressed in ("true", "false"):
        await page.keyboard.press("Enter")
        await page.wait_for_function(
            f"wanted => {FOCUSED} === 'Pin first' && document.activeElement.getAttribute('aria-pressed') === wanted",
            arg=pressed,
        )

    await window.open(f"/runs/{run}?tab=sql")
    for name in ("mine", "yours"):
        await page.get_by_label("Name for this query").fill(name)
        await page.keyboard.press("Enter")
    await _push(window, "Delete mine", "yours")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await page.wait_for_function(f"() => {FOCUSED} === 'Turns until a success'")  # the last one before it


async def test_an_address_that_nothing_can_decode_is_a_page_that_is_not_there(window: Window) -> None:
    page = window.page
    await window.open("/")
    await page.evaluate("history.pushState(null, '', '/runs/%'); dispatchEvent(new Event('monitor:navigate'))")
    await page.get_by_role("heading", name="Page not found").wait_for()


async def test_a_click_beside_everything_takes_the_focus_away_for_good(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/runs/{run}?tab=sql")
    await page.get_by_label("Name for this query").fill("mine")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Delete mine").focus()
    await page.locator("h1").click()
    await page.get_by_role("button", name="Delete mine").evaluate("one => one.click()")
    await page.get_by_role("button", name="Delete mine").wait_for(state="detached")
    assert await page.evaluate("document.activeElement.matches('body, main')")
