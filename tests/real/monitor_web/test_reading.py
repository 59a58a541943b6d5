"""Long texts, faults and small screens: everything can be read, nothing takes the page over."""

from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.events import TrainingEnded
from tests.real.monitor_web.conftest import Site, Window
from tests.real.monitor_web.runs import (
    WIFI,
    add_run,
    begin,
    begun,
    finished,
    group_end,
    group_of,
    lost,
    rollouts_of,
    step,
    with_long_texts,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
FAULT = (
    "HttpError: expected the box to answer within 30 s, got no answer from https://boxes.example/v1/boxes/"
    "0b6f6a52f2f94c0e9d3e7d3c9b6f6a52f2f94c0e; release it and lease another one. " * 3
)
LONG = replace(
    WIFI, task_id="write_a_letter", instruction="Write a letter that begins with these words: " + "word " * 400
)


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="long_run")
async def _long_run(site: Site) -> tuple[str, str, str]:
    """A run that failed: its id, the address of a rollout with long texts, and of one that a fault ended."""
    group = group_of("long", LONG, seed=3, has_fault=True)
    rollouts = tuple(with_long_texts(rollout, num_messages=40) for rollout in group.rollouts)
    group = replace(group, rollouts=rollouts, faulty=tuple(lost(rollout, FAULT) for rollout in group.faulty))
    events = (begun("step", 1, LONG), *rollouts_of("step", 1, group, LONG), group_end("step", 1, group))
    run = await add_run(site.database_url, begin("long-texts"), *events, TrainingEnded(status="failed", error=FAULT))
    of_run = f"/runs/{run}/rollouts"
    return run, f"{of_run}/{rollouts[0].rollout_id}", f"{of_run}/{group.faulty[0].rollout_id}"


@pytest.mark.parametrize("width_px", [390, 1280])
async def test_a_fault_is_told_in_lines_of_words(
    chromium: Any, site: Site, long_run: tuple[str, str, str], width_px: int
) -> None:
    page = await chromium.new_page(viewport={"width": width_px, "height": 900})
    run, _, faulty = long_run
    for path in (f"/runs/{run}", faulty):
        await page.goto(site.base_url + path)
        banner = page.locator(".notice.bad").first
        await banner.wait_for()
        lines = await banner.evaluate(
            "box => { const range = document.createRange(); range.selectNodeContents(box);"
            " return new Set([...range.getClientRects()].map(rect => Math.round(rect.top))).size; }"
        )
        words = await banner.evaluate("box => box.innerText.length / (box.clientWidth / 8)")
        assert lines <= 2 * words + 3, f"{path}: {lines} lines"
        bold = await banner.locator("b").bounding_box()
        assert bold["height"] < 25, f"{path}: the first words break into {bold['height']} px"
    await page.close()


async def test_a_long_prompt_and_long_thoughts_do_not_make_a_long_page(
    window: Window, long_run: tuple[str, str, str]
) -> None:
    page = window.page
    await window.open(long_run[1])
    await page.get_by_test_id("prompt").locator(".message").nth(39).wait_for(state="attached")
    assert await page.evaluate("document.documentElement.scrollHeight") < 3000
    last = page.get_by_test_id("prompt").locator(".message").nth(39)
    await last.scroll_into_view_if_needed()
    assert await last.is_visible()  # nothing is left out


async def test_a_long_instruction_is_cut_and_shown_whole_on_demand(
    window: Window, long_run: tuple[str, str, str]
) -> None:
    page = window.page
    await window.open(long_run[1])
    title = page.locator("h1")
    assert (await title.bounding_box())["height"] < 110
    await page.get_by_role("button", name="Show all").first.click()
    assert (await title.bounding_box())["height"] > 200
    run = long_run[0]
    for path in (f"/runs/{run}/step/1", f"/runs/{run}/step/1/groups/long", f"/runs/{run}/tasks/write_a_letter"):
        await window.open(path)
        await page.locator("main a").first.wait_for()
        assert (await page.locator(".page-head").bounding_box())["height"] < 220, path
    await window.open(f"/runs/{run}/step/1")
    assert (await page.locator(".group-row").first.bounding_box())["height"] < 130


async def test_the_chosen_tab_is_in_sight_on_a_phone(chromium: Any, site: Site) -> None:
    page = await chromium.new_page(viewport={"width": 390, "height": 900})
    await page.goto(f"{site.base_url}/runs/{site.ended.run_id}?tab=config")
    chosen = page.get_by_role("tab", selected=True)
    await chosen.wait_for()
    box = await chosen.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    await page.keyboard.press("1")
    await page.locator('[role="tab"][aria-selected="true"]', has_text="Charts").wait_for()
    assert (await page.get_by_role("tab", selected=True).bounding_box())["x"] >= 0
    await page.close()


async def test_screenshots_of_a_group_that_has_ended_are_not_dimmed(window: Window) -> None:
    page, site = window.page, window.site
    run = await add_run(site.database_url, begin("bright"), *step(1, prefix="bright"), finished())
    await window.open(f"/runs/{run}/step/1/groups/bright-1")
    images = page.locator(".member .screen img")
    await images.first.wait_for()
    assert await images.evaluate_all("all => all.map(one => getComputedStyle(one).opacity)") == ["1"] * 3


async def test_settings_can_be_read_on_a_phone(chromium: Any, site: Site) -> None:
    page = await chromium.new_page(viewport={"width": 390, "height": 900})
    settings = begin("many-settings", loss="importance_sampling", gbox_mini_agent_standard_action_space="mobile")
    run = await add_run(site.database_url, settings, finished())
    await page.goto(f"{site.base_url}/runs/{run}?tab=config")
    value = page.get_by_role("cell", name="importance_sampling")
    await value.wait_for()
    lines = (
        "cell => { const range = document.createRange(); range.selectNodeContents(cell);"
        " return range.getClientRects().length; }"
    )
    assert await value.evaluate(lines) == 1
    await page.close()


async def test_small_negative_numbers_have_one_kind_of_minus_sign(window: Window) -> None:
    numbers = {"reward/mean": 0.5, "loss/policy": -6.35e-8}
    run = await add_run(window.site.database_url, begin("small-numbers"), *step(1, metrics=numbers), finished())
    await window.open(f"/runs/{run}/step/1")
    await window.page.get_by_text("\u22126.35e\u22128", exact=True).first.wait_for()


async def test_a_count_that_stays_at_zero_has_no_axis_up_to_a_hundred(window: Window) -> None:
    page = window.page
    events = [event for number in (1, 2) for event in step(number, metrics={"rollout/num_faults": 0.0}, prefix="quiet")]
    run = await add_run(window.site.database_url, begin("quiet", total_steps=2), *events, finished())
    # uPlot draws its axes on a canvas: the text that it draws is all that can be read of them
    await page.add_init_script(
        "window.drawn = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest)"
        " { window.drawn.push(text); return fill.call(this, text, ...rest); };"
    )
    await window.open(f"/runs/{run}")
    figure = page.locator('figure[aria-label="Infrastructure faults"]')
    await figure.scroll_into_view_if_needed()
    await figure.locator(".u-over").wait_for()
    await page.wait_for_function("window.drawn.includes('1')")
    assert "100" not in await page.evaluate("window.drawn")
