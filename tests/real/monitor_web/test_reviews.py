"""A person goes through what validator and judge disagree about, by keys, and sees what the verdicts change."""

import re

import pytest

from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, finished, remove, step
from tests.real.monitor_web.test_sets import Hand
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_queue_of_disagreements_is_worked_off_by_keyboard(window: Window) -> None:
    page, url, hand = window.page, window.site.database_url, Hand()
    await page.emulate_media(reduced_motion="reduce")
    events = [event for number in range(1, 7) for event in step(number, prefix="review")]
    run = await add_run(url, begin("review", total_steps=6), *events, finished())
    query = f"run_id={run}&judge=disagrees&review=none"
    queue = (await window.json(f"/api/rollouts?{query}"))["items"]
    assert len(queue) >= 2

    await window.open(f"/runs/{run}?tab=verdicts")
    await hand.click(page.get_by_role("link", name="What validator and judge disagree about"))
    await hand.click(page.get_by_role("link", name="Go through"))
    assert hand.num_clicks <= 2
    walk = page.get_by_role("navigation", name="Set")
    await walk.get_by_text(f"1 of {len(queue)}").wait_for()
    assert f"/rollouts/{queue[0]['rollout_id']}?set=" in page.url
    assert await violations_of(page) == []

    await page.keyboard.press("o")
    assert await violations_of(page) == []
    await page.get_by_label("Reason").fill("the switch is on")
    await page.get_by_label("Your name").fill("Ada")
    await page.keyboard.press("Enter")
    await page.get_by_label("Access token").fill(WRITE_TOKEN)
    await page.keyboard.press("Enter")
    await page.get_by_test_id("overrides").wait_for()
    await walk.get_by_text(f"none of {len(queue) - 1}").wait_for()

    await page.keyboard.press("n")
    await page.wait_for_url(re.compile(queue[1]["rollout_id"]))
    await walk.get_by_text(f"1 of {len(queue) - 1}").wait_for()
    assert await walk.get_by_role("button", name="Previous").is_disabled()
    if len(queue) > 2:
        await page.keyboard.press("n")
        await page.wait_for_url(re.compile(queue[2]["rollout_id"]))
        await walk.get_by_text(f"2 of {len(queue) - 1}").wait_for()
        await page.keyboard.press("p")
        await page.wait_for_url(re.compile(queue[1]["rollout_id"]))
    await page.keyboard.press("u")
    await page.wait_for_url(re.compile(r"/rollouts\?run_id"))
    await page.wait_for_function(
        "wanted => document.querySelectorAll('table.rollouts a[data-row]').length === wanted", arg=len(queue) - 1
    )
    assert await page.locator(f'a[href*="{queue[0]["rollout_id"]}"]').count() == 0
    window.complaints[:] = [one for one in window.complaints if "401" not in one]
    await remove(window, [run])


async def test_success_as_recorded_and_as_reviewed_stand_beside_each_other(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    events = [event for number in (1, 2) for event in step(number, prefix="figures")]
    run = await add_run(url, begin("figures"), *events, finished())
    (first, *_) = (await window.json(f"/api/rollouts?run_id={run}&status=completed"))["items"]
    answer = await page.request.post(
        f"{window.site.base_url}/api/runs/{run}/rollouts/{first['rollout_id']}/overrides",
        data={"success": not first["success"], "reason": "looked at it", "actor": "Ada"},
        headers={"Authorization": f"Bearer {WRITE_TOKEN}"},
    )
    assert answer.ok

    await window.open(f"/rollouts?run_id={run}&view=summary")
    found = await window.json(f"/api/rollouts/summary?run_id={run}")
    await page.get_by_text("Success as reviewed").wait_for()
    stats = await page.locator(".stats").first.inner_text()
    for label, rate in (("Success as recorded", "success"), ("Success as reviewed", "success_as_reviewed")):
        shown = f"{100 * found[rate]['rate']:.1f}"
        assert re.search(rf"{label}\s+{re.escape(shown)}", stats, re.IGNORECASE), stats
    assert found["success"]["rate"] != found["success_as_reviewed"]["rate"]
    assert await violations_of(page) == []
    wanted = "recorded success, reviewed failure" if first["success"] else "recorded failure, reviewed success"
    await page.get_by_role("link", name=wanted).click()
    await page.wait_for_url(re.compile(r"review=overturned"))
    await remove(window, [run])
