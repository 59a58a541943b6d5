"""Tags and notes in the web app: a few keys or clicks to give one, and a set of all that have it."""

import re

import pytest

from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, finished, remove, step
from tests.real.monitor_web.test_sets import Hand
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_tag_on_a_turn_makes_a_set_that_is_two_clicks_away(window: Window) -> None:
    page, url, hand = window.page, window.site.database_url, Hand()
    await page.emulate_media(reduced_motion="reduce")
    run = await add_run(url, begin("noted"), *step(1, prefix="noted"), finished())
    (rollout, *_) = (await window.json(f"/api/rollouts?run_id={run}&status=completed"))["items"]

    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}")
    await page.get_by_role("heading", name="Notes").wait_for()
    await page.keyboard.press("a")
    assert await violations_of(page) == []
    await page.keyboard.type("wrong icon")
    await page.get_by_label("Note", exact=True).fill("It opened the clock.\nTwice.")
    await page.get_by_label("about turn 1 only").check()
    await page.get_by_label("Your name").fill("Ada")
    await page.keyboard.press("Enter")
    await page.get_by_label("Access token").fill(WRITE_TOKEN)
    await page.get_by_role("button", name="Sign in and save").click()
    shown = page.get_by_test_id("notes")
    await shown.get_by_text("wrong icon · turn 1").wait_for()
    assert "It opened the clock.\nTwice." in await shown.inner_text()
    assert await violations_of(page) == []

    await window.open(f"/rollouts?run_id={run}")
    await hand.click(page.get_by_role("tab", name="Figures"))
    await hand.click(page.get_by_role("link", name="wrong icon"))
    assert hand.num_clicks <= 2
    await page.wait_for_url(re.compile(r"tag=wrong"))
    await page.get_by_role("tab", name="Table").click()
    row = page.locator("table.rollouts tbody tr")
    await row.get_by_text("wrong icon").wait_for()
    assert await row.count() == 1
    assert await violations_of(page) == []

    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}")
    await page.get_by_role("button", name="Remove the tag wrong icon").click()
    assert await violations_of(page) == []
    await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    await page.get_by_role("button", name="Remove the tag wrong icon").wait_for(state="detached")
    assert (await window.json(f"/api/rollouts?run_id={run}&tag=wrong+icon"))["items"] == []
    window.complaints[:] = [one for one in window.complaints if "401" not in one]
    await remove(window, [run])


async def test_a_tag_of_a_run_is_seen_and_found_in_the_list_of_runs(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    run = await add_run(url, begin("tagged"), *step(1, prefix="tagged"), finished())
    answer = await page.request.post(
        f"{window.site.base_url}/api/runs/{run}/notes",
        data={"tag": "for the paper", "actor": "Ada"},
        headers={"Authorization": f"Bearer {WRITE_TOKEN}"},
    )
    assert answer.ok
    await window.open("/?q=the+paper")
    await page.locator("table.runs tbody tr").get_by_text("for the paper").wait_for()
    assert await page.locator("table.runs tbody tr").count() == 1
    assert await violations_of(page) == []
    await page.get_by_role("link", name="tagged").click()
    await page.get_by_test_id("notes").get_by_text("for the paper").wait_for()
    assert await violations_of(page) == []
    await remove(window, [run])
