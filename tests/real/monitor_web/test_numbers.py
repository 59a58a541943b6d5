"""Numbers on pages: what they count, that they agree with each other, and that verdicts of people show at once."""

import re
from typing import Any

import pytest

from cua_rl.evaluation.statistics import rate_interval
from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import NUM_STEPS, Window

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _stat(window: Window, label: str) -> str:
    """What stands under a label at the top of a page."""
    stat = window.page.locator(".stats .stat").filter(has=window.page.get_by_text(label, exact=True))
    return (await stat.inner_text()).replace("\n", " ")


async def test_a_step_has_one_number_on_every_page(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    await window.open(f"/runs/{run}?tab=timeline")
    await page.locator("[data-row]").first.wait_for()
    names = await page.locator("a[data-row]").all_inner_texts()
    assert names == ["Evaluation after 4 steps", "Step 4", "Step 3", "Step 2", "Step 1", "Baseline"]
    await page.get_by_role("link", name="Step 1", exact=True).click()
    await page.get_by_role("heading", name="Step 1").wait_for()
    assert (await _stat(window, "Adapter")).endswith("0 → 1")  # step N makes policy N
    assert await page.get_by_role("button", name="First", exact=True).is_disabled()
    await page.locator(".cell").first.click()
    await page.locator(".token-strip [role=option]").first.click()
    assert re.search(r"trained in step\s+1\b", await page.get_by_test_id("token-facts").inner_text())


async def test_the_headline_counts_finished_steps_and_a_ring_marks_the_one_under_way(window: Window) -> None:
    run, page = window.site.running, window.page
    number = run.num_steps + 1
    before = (await window.json(f"/api/runs/{run.run_id}"))["success_rate"]
    groups = await run.run_rollouts(turns=1)
    try:
        await window.open(f"/runs/{run.run_id}")
        chart = page.locator('figure[aria-label="Success"]')
        await chart.get_by_text(f"step {number} under way, 3 of 3 groups").wait_for()
        headline = await _stat(window, f"Success, step {number - 1}")
        assert f"{100 * before:.1f}" in headline
        assert f"step {number} under way" in headline
        points = (await window.json(f"/api/runs/{run.run_id}/metrics"))["success"]
        assert [point["step"] for point in points] == list(range(1, number))
        await window.open(f"/runs/{run.run_id}/step/{number}")
        assert await _stat(window, "Success so far")
    finally:
        await run.train(groups)
    await window.open(f"/runs/{run.run_id}")
    assert await _stat(window, f"Success, step {number}")
    assert await page.get_by_text("under way").count() == 0


async def test_group_page_cell_and_rollout_agree_about_a_verdict_that_is_saved_by_signing_in(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    step = await window.json(f"/api/runs/{run}/step/2")
    group = step["groups"][1]
    rollout = next(one for one in group["rollouts"] if not one["success"])
    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}")
    await page.get_by_role("button", name="Override").click()
    await page.get_by_role("button", name="✓ Success").click()
    await page.get_by_label("Reason").fill("it was done")
    await page.get_by_label("Your name").fill("Ada")
    await page.get_by_role("button", name="Save verdict").click()
    await page.get_by_label("Access token").fill(WRITE_TOKEN)
    await page.get_by_role("button", name="Sign in and save").click()
    await page.get_by_test_id("overrides").wait_for()  # once is enough
    window.complaints[:] = [one for one in window.complaints if "401" not in one]

    outcome = await _stat(window, "Outcome")
    assert "success" in outcome
    assert "validator: failure" in outcome
    assert "as trained on" in await _stat(window, "Reward")
    await window.open(f"/runs/{run}/step/2/groups/{group['group_id']}")
    badges = page.locator(".member .badge.good")
    await badges.first.wait_for()
    won = group["num_successes"]
    assert await badges.count() == won + 1
    assert f"{won + 1} of 8, {won} by the validator" in await _stat(window, "Successes")


def _smoothed(points: list[dict[str, Any]], weight: float) -> list[tuple[float, float, float]]:
    """Rate, low and high of the moving average: a mean with weights w of rates from n independent trials has
    (sum of w)^2 / (sum of w^2 / n).
    """
    found: list[tuple[float, float, float]] = []
    for last in range(len(points)):
        weights = [weight ** (last - place) for place in range(last + 1)]
        pairs = list(zip(weights, points[: last + 1], strict=True))
        rate = sum(w * point["rate"] for w, point in pairs) / sum(weights)
        trials = sum(weights) ** 2 / sum(w * w / point["num_independent"] for w, point in pairs)
        found.append((rate, *rate_interval(rate, trials)))
    return found


async def test_the_band_under_smoothing_is_the_interval_of_the_line_and_bounds_have_no_rings(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    points = (await window.json(f"/api/runs/{run}/metrics"))["success"]
    for smoothing in (0.0, 0.9):
        await window.open(f"/runs/{run}?smooth={smoothing}")
        plot = page.locator('.chart-plot[aria-label^="Success:"] .u-over')
        await plot.wait_for()
        box = await plot.bounding_box()
        for step, expected in enumerate(_smoothed(points, smoothing), start=1):  # on an axis from 0 to 4
            await page.mouse.move(box["x"] + box["width"] * step / NUM_STEPS - 1, box["y"] + 60)
            readout = page.locator('figure[aria-label="Success"] .chart-readout')
            await readout.get_by_text(f"step {step}", exact=True).wait_for()
            found = re.search(r"training rollouts\D*(\d+)\D+(\d+)\D+(\d+)", await readout.inner_text())
            assert found is not None
            assert [int(text) for text in found.groups()] == pytest.approx([100 * one for one in expected], abs=0.51)
            assert int(found[2]) <= int(found[1]) <= int(found[3])
        rings = page.locator('.chart-plot[aria-label^="Success:"] .u-cursor-pt')
        width = "ring => ring.getBoundingClientRect().width"
        sizes = [await rings.nth(place).evaluate(width) for place in range(await rings.count())]
        assert sum(size > 0 for size in sizes) == 1  # the line's; neither raw values nor the ends of intervals have one


async def test_evaluations_speak_of_evaluation_and_step_on_from_the_baseline(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    await window.open(f"/runs/{run}/baseline/0")
    await page.locator(".cell").first.wait_for()
    for word in ("constant", "teaching", "teaches"):
        assert await page.get_by_text(re.compile(word, re.IGNORECASE)).count() == 0, word
    assert await page.get_by_role("button", name="First", exact=True).is_disabled()
    await page.keyboard.press("]")
    await page.get_by_role("heading", name=f"Evaluation after {NUM_STEPS} steps").wait_for()
    await page.get_by_role("button", name="Never solved").click()
    await page.keyboard.press("[")
    await page.wait_for_url(re.compile(r"/baseline/0"))
    evaluation = await window.json(f"/api/runs/{run}/eval/{NUM_STEPS}")
    group = evaluation["groups"][0]
    await window.open(f"/runs/{run}/eval/{NUM_STEPS}/groups/{group['group_id']}")
    await page.get_by_text("On a common time axis").wait_for()
    assert await page.get_by_text("no learning signal").count() == 0

    await window.open(f"/runs/{run}/tasks/{group['task_id']}")
    await page.get_by_text(f"Hardest instances, evaluation after {NUM_STEPS} steps").wait_for()
    assert await page.get_by_text("Success in training").count() == 0
    task = await window.json(f"/api/runs/{run}/tasks/{group['task_id']}")
    for label, rate in (("Baseline", task["baseline"]), (f"Evaluation after {NUM_STEPS} steps", task["last_eval"])):
        assert f"{rate['num_successes']} of {rate['num_rollouts']}" in await _stat(window, label)


async def test_an_evaluation_with_faults_shows_what_they_leave_open(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    told = "3 faults: 25 % to 50 %"
    await window.open(f"/runs/{run}")
    assert told in await _stat(window, "Held-out success")
    await window.open(f"/runs/{run}?tab=evals")
    rows = page.locator("tbody tr").filter(has=page.locator("[data-row]"))
    await rows.first.wait_for()
    assert [told in text for text in await rows.all_inner_texts()] == [False, True]  # the baseline met none
    await window.open(f"/runs/{run}/eval/{NUM_STEPS}")
    assert "25 % to 50 %, 3 faults" in await _stat(window, "Success with faults")
    await window.open(f"/runs/{run}/baseline/0")
    await page.locator(".cell").first.wait_for()
    assert await page.get_by_text("Success with faults").count() == 0


async def test_categories_and_difficulties_have_tables_of_their_own(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    await window.open(f"/runs/{run}?tab=evals")
    await page.get_by_role("heading", name="By difficulty").wait_for()
    (baseline, *_) = await window.json(f"/api/runs/{run}/evaluations")
    for title, field in (("By category", "by_category"), ("By difficulty", "by_difficulty")):
        panel = page.locator(".panel").filter(has=page.get_by_role("heading", name=title))
        kinds = await panel.locator("tbody td:first-child").all_inner_texts()
        assert kinds == sorted(baseline[field])
    assert set(baseline["by_difficulty"]) <= {"easy", "medium", "hard"}
    assert not set(baseline["by_category"]) & {"easy", "medium", "hard"}


async def test_groups_whose_rewards_are_equal_have_one_name(window: Window) -> None:
    await window.open(f"/runs/{window.site.ended.run_id}")
    await window.page.locator('figure[aria-label="Constant groups"]').wait_for()
    assert await window.page.get_by_text("without signal").count() == 0
