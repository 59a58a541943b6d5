"""Cost and stragglers in the browser: amounts, money, and where each of them leads."""

from typing import Any

import pytest

from tests.real.monitor_web.conftest import NUM_STEPS, PRICES, Window

pytestmark = pytest.mark.asyncio(loop_scope="session")


def dollars(text: str) -> float:
    return float(text.replace("$", "").replace(",", ""))


def money(cost: Any) -> float:
    """By hand, at the two prices that this monitor has."""
    assert (PRICES.device_hour, PRICES.sampled_million_tokens) == (7.2, 100.0)
    return cost["device_s"] * 7.2 / 3600 + cost["sampled_tokens"] * 100 / 1e6


async def test_from_a_runs_cost_to_the_rollouts_of_a_task_are_three_clicks(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    found = await window.json(f"/api/runs/{run}/cost")
    whole = await window.json(f"/api/rollouts/cost?run_id={run}&phase=step")

    await window.open(f"/runs/{run}")
    await page.get_by_role("tab", name="Cost").click()
    await page.get_by_test_id("total-cost").first.wait_for()
    shown = [dollars(text) for text in await page.get_by_test_id("total-cost").all_inner_texts()]
    assert shown == pytest.approx([money(found["training"]), money(found["evaluations"])], rel=0.06)
    rows = page.locator("table.data tbody tr")
    assert await rows.count() == len(found["versions"]) == 2  # the baseline, and the last step with its evaluation
    assert f"step {NUM_STEPS}" in await rows.first.inner_text()
    assert await page.locator('.chart[aria-label="Success by US dollars"]').count() == 1

    await page.get_by_role("link", name="By task and step").click()
    first = page.locator("table.data").first.locator("tbody tr").first
    (task, *_) = whole["tasks"]
    await first.get_by_role("link", name=task["task_id"]).wait_for()
    assert dollars(await page.get_by_test_id("total-cost").inner_text()) == pytest.approx(
        money(whole["cost"]), rel=0.06
    )
    await first.get_by_role("link", name=str(task["cost"]["num_rollouts"]), exact=True).click()
    await page.wait_for_function(
        "wanted => document.querySelectorAll('table.rollouts a[data-row]').length === wanted",
        arg=task["cost"]["num_rollouts"],
    )

    await page.get_by_role("button", name="Tokens", exact=True).click()  # the column, largest first
    await page.wait_for_url("**sort=-tokens**")
    await page.locator("table.rollouts a[data-row]").first.click()
    told = await page.get_by_test_id("rollout-cost").inner_text()
    rollout = await window.json("/api" + page.url.partition(window.site.base_url)[2].partition("?")[0])
    assert f"{rollout['num_sampled_tokens']:,} sampled" in told
    assert rollout["num_sampled_tokens"] == sum(
        [
            len((await window.json(f"/api/runs/{run}/rollouts/{rollout['rollout_id']}/turns/{index}/tokens"))["tokens"])
            for index in range(rollout["num_turns"])
        ]
    )


async def test_a_step_and_the_timeline_lead_to_its_stragglers_and_show_how_machines_were_used(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    query = f"run_id={run}&phase=step&step=1"
    slow = (await window.json(f"/api/rollouts?{query}&stragglers=true"))["items"]
    every = (await window.json(f"/api/rollouts?{query}&limit=200"))["items"]
    assert 0 < len(slow) < len(every)
    assert max(every, key=lambda one: one["duration_s"])["rollout_id"] in {one["rollout_id"] for one in slow}

    for path, link in (
        (f"/runs/{run}/step/1", page.get_by_role("link", name="stragglers")),
        (f"/runs/{run}?tab=timeline", page.locator("tr").filter(has_text="Step 1").locator('a[href*="stragglers"]')),
    ):
        await window.open(path)
        await link.click()
        await page.wait_for_function(
            "wanted => document.querySelectorAll('table.rollouts a[data-row]').length === wanted", arg=len(slow)
        )
        await page.get_by_role("button", name="Remove stragglers true").wait_for()

    metrics = (await window.json(f"/api/runs/{run}/metrics"))["series"]
    await window.open(f"/runs/{run}?tab=timeline")
    use = page.locator(".run-use")
    await use.first.wait_for()
    texts = await use.all_inner_texts()
    busy = [work / took for work, took in zip(metrics["trainer/busy_s"], metrics["time/step_s"], strict=True)]
    peak = max(metrics["trainer/peak_reserved_gib"])
    assert f"highest {100 * max(busy):.0f} %" in next(text for text in texts if text.startswith("Trainer busy"))
    assert f"highest {peak:.3g} GiB" in next(text for text in texts if text.startswith("GPU memory"))
    assert len(texts) == 4  # those that this run recorded, with MFU and devices
    await page.set_viewport_size({"width": 390, "height": 900})
    for figure in await use.all():  # nothing lies on the bars, and nothing is cut off
        words, bars = figure.locator("figcaption"), await figure.locator("svg").bounding_box()
        box = await words.bounding_box()
        assert box["y"] + box["height"] <= bars["y"]
        assert await words.evaluate("one => one.scrollWidth <= one.clientWidth")
    await page.locator(".run-clock").get_by_text("stronger colours").wait_for()
