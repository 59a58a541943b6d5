"""What a page of charts shows, over what and from where to where is in its address, and can be kept by name."""

import asyncio
import re
from typing import Any

import pytest

from tests.patience import patience
from tests.real.monitor_web.conftest import NUM_STEPS, Window
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _read_at_the_end(window: Window, title: str, told: str) -> Any:
    """Point at the right end of a chart until it says this, as it may just be drawn anew; its plot."""
    page = window.page
    plot = page.locator(f'.chart-plot[aria-label^="{title}:"] .u-over')
    text = page.locator(f'figure[aria-label="{title}"]').get_by_text(told)
    async with asyncio.timeout(patience(60)):
        while not await text.is_visible():
            await plot.scroll_into_view_if_needed()
            box = await plot.bounding_box()
            await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
            await page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
            await asyncio.sleep(0.05)
    return plot


async def test_a_zoom_is_in_the_address_and_goes_with_it(window: Window) -> None:
    page = window.page
    await window.open(f"/runs/{window.site.ended.run_id}")
    plot = await _read_at_the_end(window, "Reward", f"step {NUM_STEPS}")
    box = await plot.bounding_box()
    await page.mouse.move(box["x"] + 3, box["y"] + 40)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 40, steps=5)
    await page.mouse.up()
    await page.wait_for_url(re.compile(r"zoom="))
    await page.reload()
    await _read_at_the_end(window, "Reward", "step 2")  # the steps go from 1 to 4
    await page.get_by_role("button", name="Reset zoom").click()
    await page.wait_for_url(lambda url: "zoom" not in url)


async def test_charts_over_rollouts_tokens_and_time_lead_to_the_same_steps(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    metrics = await window.json(f"/api/runs/{run}/metrics")
    rollouts = sum(one["num_rollouts"] for one in metrics["success"])
    tokens = sum(metrics["series"]["rollout/sampled_tokens"])
    assert metrics["tokens"][-1] == tokens == 5000.0  # 1100 + 1200 + 1300 + 1400
    for unit, told in (("rollouts", f"rollout {rollouts}"), ("sampled tokens", "token 5K"), ("time", "time ")):
        await window.open(f"/runs/{run}")
        await page.get_by_label("over").select_option(unit)
        plot = await _read_at_the_end(window, "Reward", told)
        box = await plot.bounding_box()
        await plot.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
        await page.wait_for_url(re.compile(rf"/runs/{run}/step/{NUM_STEPS}$"))

    other = window.site.running.run_id
    await window.open(f"/compare?runs={run},{other}&x=rollout")
    await _read_at_the_end(window, "Reward", f"rollout {rollouts}")


async def test_chosen_charts_are_a_view_that_can_be_kept_by_name_and_used_on_another_run(window: Window) -> None:
    page, site = window.page, window.site
    await page.emulate_media(reduced_motion="reduce")
    await window.open(f"/runs/{site.ended.run_id}")
    charts = page.locator("figure.chart")
    await charts.nth(3).wait_for(state="attached")
    await page.locator("summary", has_text="Charts").click()
    await page.get_by_role("button", name="None", exact=True).click()
    await page.get_by_label("Gradient norm").check()
    await page.get_by_label("Reward", exact=True).check()
    await page.keyboard.press("Escape")
    await page.get_by_label("over").select_option("rollouts")
    assert await charts.evaluate_all("all => all.map(one => one.ariaLabel)") == ["Reward", "Gradient norm"]
    await page.locator("summary", has_text="Views").click()
    assert await violations_of(page) == []
    await page.get_by_label("Name of the view").fill("is it stable?")
    await page.keyboard.press("Enter")
    kept = page.get_by_role("button", name="is it stable?", exact=True)
    await kept.wait_for()

    await window.open(f"/compare?runs={site.ended.run_id},{site.running.run_id}")
    await charts.nth(3).wait_for(state="attached")
    await page.locator("summary", has_text="Views").click()
    await kept.click()
    assert await charts.evaluate_all("all => all.map(one => one.ariaLabel)") == ["Reward", "Gradient norm"]
    assert await page.get_by_label("over").input_value() == "rollout"
    await page.get_by_role("button", name="Forget is it stable?").click()
    await kept.wait_for(state="detached")
    await page.reload()
    await page.locator("summary", has_text="Views 0").wait_for()
