"""Nothing is cut, joined or left out without a word: long lists, curves of a run that changed, tasks lost to faults."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cua_rl.events import EvaluationEnded, RolloutSource
from tests.real.monitor_web.conftest import NUM_STEPS, Window
from tests.real.monitor_web.runs import HELD_OUT, WIFI, add_run, begin, begun, finished, group_end, group_of, step
from tests.real.monitor_web.runs import rollouts_of as rollouts

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHANGED = [{"after_step": 3, "settings": {"tasks": ["demo_training", "my_tasks"]}, "begins_curve": True}]


async def _ask_for_less(window: Window, path: str, size: int) -> None:
    """Let the first request of a list ask for so few rows that most are left."""

    async def shorten(route: Any) -> None:
        await route.continue_(url=re.sub(r"limit=\d+", f"limit={size}", route.request.url))

    await window.page.route(re.compile(path), shorten)


async def _answer(content: Any, route: Any) -> None:
    await route.fulfill(json=content)


async def test_columns_sort_runs_steps_and_evaluations(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    rows = page.locator("tbody a[data-row]")
    for path, column, largest_first in (
        ("/?q=first&sort=-Run", "Run", ["first"]),
        (f"/runs/{run}?tab=timeline", "Adapter", ["Evaluation after 4 steps", "Step 4"]),
        (f"/runs/{run}?tab=evals", "Adapter", ["Evaluation after 4 steps", "Baseline"]),
    ):
        await window.open(path)
        await rows.first.wait_for()
        button = page.locator("th button").filter(has_text=column).first
        header = page.locator("th").filter(has=page.locator("button", has_text=column)).first
        if "sort" not in path:
            await button.click()
        assert await header.get_attribute("aria-sort") == "descending"
        assert (await rows.all_inner_texts())[: len(largest_first)] == largest_first
        await button.click()
        assert await header.get_attribute("aria-sort") == "ascending"
        assert (await rows.all_inner_texts())[-1] == largest_first[0]


async def test_long_lists_say_how_much_of_them_is_shown_and_show_the_rest(window: Window) -> None:
    page, url = window.page, window.site.database_url
    events = [event for number in range(1, 5) for event in step(number, task=replace(WIFI, seed=number), prefix="long")]
    run = await add_run(url, begin("long"), *events, finished())
    task = await window.json(f"/api/runs/{run}/tasks/settings_wifi_on?limit=1")
    assert [len(task[name]) for name in ("instances", "failed_checks", "failed_rollouts")] == [1, 1, 1]
    failed = (await window.json(f"/api/runs/{run}/rollouts?verdict=failure"))["items"]
    assert (task["num_instances"], task["num_failed_rollouts"]) == (4, len(failed))

    await _ask_for_less(window, r"/tasks/settings_wifi_on\?limit=100$", 1)
    await window.open(f"/runs/{run}/tasks/settings_wifi_on")
    instances = page.locator(".panel").filter(has=page.get_by_role("heading", name="Hardest instances"))
    await instances.get_by_text("1 of 4 are shown").wait_for()
    await page.get_by_text(f"1 of {len(failed)} are shown").wait_for()
    await instances.get_by_role("button", name="Show all").click()
    await instances.get_by_text("seed 4").wait_for()
    assert await instances.get_by_text("are shown").count() == 0

    await _ask_for_less(window, r"/rollouts\?limit=24$", 2)
    await window.open(f"/runs/{run}?tab=live")
    await page.get_by_text("2 of 12 rollouts are shown").wait_for()
    await page.get_by_role("button", name="Show more").click()
    await page.get_by_text("rollouts are shown").wait_for(state="detached")
    assert await page.locator(".wall .member").count() == 12

    await _ask_for_less(window, r"/api/runs\?limit=200$", 1)
    for path in ("/compare", f"/runs/{run}?tab=config"):
        await window.open(path)
        total = (await window.json("/api/runs"))["num_runs"]
        await page.get_by_text(f"newest 1 of {total}").wait_for()
        await page.get_by_role("button", name="Load older").click()
        await page.get_by_role("option", name="first", exact=True).wait_for(state="attached")


_COLOURED = """(canvas, share) => {
  const data = canvas.getContext("2d").getImageData(Math.round(canvas.width * share), 0, 1, canvas.height).data;
  return data.some((_, i) => i % 4 === 0 && data[i + 3] > 200 && data[i + 2] - data[i] > 60);
}"""


async def test_lines_of_a_run_resumed_with_other_tasks_are_not_connected(window: Window) -> None:
    page, url = window.page, window.site.database_url
    tasks = [{"source_type": "my_tasks", "weight": 2}, {"source_type": "demo_training"}]
    events = [event for number in range(1, 7) for event in step(number, prefix="curves")]
    run = await add_run(url, begin("curves", total_steps=6, changed=CHANGED, tasks=tasks), *events, finished())
    assert (await window.json(f"/api/runs/{run}"))["curve_ends"] == [3]
    await window.open(f"/runs/{run}?smooth=0.5")
    await page.get_by_text("Resumed with other settings after step 3").wait_for()
    plot = page.locator('.chart-plot[aria-label^="Reward:"]')
    await plot.scroll_into_view_if_needed()
    canvas = plot.locator("canvas")
    box, over = await canvas.bounding_box(), await plot.locator(".u-over").bounding_box()
    for x, is_drawn in ((2.5, True), (3.3, False), (3.7, False), (4.5, True)):  # on an axis of steps 1 to 6
        share = (over["x"] - box["x"] + over["width"] * (x - 1) / 5) / box["width"]
        assert await canvas.evaluate(_COLOURED, share) is is_drawn, x

    await window.open(f"/runs/{run}?tab=config")
    row = page.locator("tr").filter(has_text="tasks[0].weight")
    assert (await row.inner_text()).split() == ["tasks[0].weight", "2"]
    assert await page.get_by_text("{").count() == 0


async def test_dots_and_lines_have_a_legend_wherever_the_pointer_is(window: Window) -> None:
    run, page = window.site.ended.run_id, window.page
    await window.open(f"/runs/{run}")
    figure = page.locator('figure[aria-label="Success"]')
    box = await figure.locator(".u-over").bounding_box()
    await page.mouse.move(box["x"] + box["width"] / NUM_STEPS, box["y"] + 40)  # step 1 has no evaluation
    await figure.get_by_text("step 1", exact=True).wait_for()
    assert await figure.locator(".chart-key:has(.line)").get_by_text("training rollouts").count() == 1
    assert await figure.locator(".chart-key:has(.dot)").get_by_text("held-out tasks").count() == 1
    await window.open(f"/runs/{run}?tab=evals")
    await page.locator(".chart-key:has(.dot)").get_by_text("held-out success").wait_for()


async def test_tasks_lost_to_faults_stand_beside_the_rate_and_pass_at_k_says_why_it_is_missing(window: Window) -> None:
    page, url = window.page, window.site.database_url
    kept, lost = group_of("kept", HELD_OUT, seed=1), group_of("lost", HELD_OUT, seed=2, has_fault=True)
    lost = replace(lost, rollouts=())
    both = replace(begun("baseline", 0, HELD_OUT), tasks=(HELD_OUT, HELD_OUT))
    source = RolloutSource(phase="baseline", step=0)
    ends = [group_end("baseline", 0, group) for group in (kept, lost)]
    shown = [event for group in (kept, lost) for event in rollouts("baseline", 0, group, HELD_OUT)]
    run = await add_run(url, begin("lossy"), both, *shown, *ends, EvaluationEnded(source=source, metrics={}))
    told = "1 task lost to faults"
    for path in ("/?q=lossy", f"/runs/{run}", f"/runs/{run}?tab=evals", f"/runs/{run}?tab=timeline"):
        await window.open(path)
        await page.get_by_text(told).first.wait_for()
    await window.open(f"/runs/{run}/baseline/0")
    await page.get_by_text(told).wait_for()

    model: dict[str, Any] = {
        "name": "base",
        "success_rate": 0.5,
        "low": 0.2,
        "high": 0.8,
        "pass_at": {},
        "num_rollouts": 15,
    }
    model |= {"num_short_tasks": {"1": 2, "4": 3}, "num_faults": 6, "worst": 0.25, "best": 0.75}
    page_of = {"name": "b", "title": None, "path": "b", "written_at": "2026-01-01T00:00:00Z"}
    answer: Any = {"benchmarks": [page_of | {"results": {"models": [model]}}], "num_others": 3}
    await page.route(re.compile("/api/benchmarks"), partial(_answer, answer))
    await window.open("/benchmarks")
    await page.get_by_text("3 further files of results are older").wait_for()
    await page.get_by_text("fewer than 4 attempts at 3 tasks, for faults").wait_for()
    assert await page.locator("th").filter(has_text="pass@1").count() == 0
    await page.get_by_text("2 tasks lost to faults").wait_for()
    await page.get_by_text("6 faults: 25 % to 75 %").wait_for()
