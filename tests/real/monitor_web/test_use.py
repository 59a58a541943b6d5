"""What people do with the web app: trace a number to its token, watch a run, judge a rollout, go by keyboard."""

import asyncio
import json
import re
from functools import partial
from operator import ne
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.patience import IdleClock
from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Window

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _first_rollout(window: Window, step: int) -> dict[str, Any]:
    address = f"{window.site.base_url}/api/runs/{window.site.ended.run_id}/step/{step}"
    answer = await (await window.page.request.get(address)).json()
    return answer["groups"][0]["rollouts"][0]


async def test_three_clicks_lead_from_a_chart_to_a_token_with_screenshot_request_adapter_and_reward(
    window: Window,
) -> None:
    page = window.page
    await window.open(f"/runs/{window.site.ended.run_id}")
    plot = page.locator('.chart-plot[aria-label^="Reward:"] .u-over')
    await plot.wait_for()
    box = await plot.bounding_box()
    await plot.click(position={"x": box["width"] * 2 / 3, "y": box["height"] / 2})  # of steps 1 to 4, step 3
    await page.wait_for_url(re.compile(r"/step/3$"))
    await page.locator(".cell").first.click()
    await page.wait_for_url(re.compile(r"/rollouts/"))
    await page.locator('.token-strip [role="option"]').nth(4).click()

    facts = await page.get_by_test_id("token-facts").inner_text()
    stored = await _first_rollout(window, 3)
    assert "policy-000002" in facts
    assert "0.01" in facts  # the trainer's log-probability is that much lower
    assert f"reward\n{stored['reward']:g}" in facts.replace("\n\n", "\n")
    assert await page.locator(".stage img").first.evaluate("image => image.naturalWidth") > 0
    assert await page.get_by_test_id("prompt").locator("img").count() >= 1
    assert "You operate an Android phone" in await page.get_by_test_id("prompt").inner_text()


async def test_the_address_alone_brings_back_turn_token_and_colouring(window: Window) -> None:
    rollout = await _first_rollout(window, 1)
    await window.open(f"/runs/{window.site.ended.run_id}/rollouts/{rollout['rollout_id']}?turn=2&token=3&color=gap")
    await window.page.get_by_test_id("token-facts").wait_for()
    assert "4 of" in await window.page.get_by_test_id("token-facts").inner_text()
    assert await window.page.locator('.frame[aria-current="step"]').count() == 1
    assert await window.page.get_by_role("button", name="Gap").get_attribute("aria-pressed") == "true"
    await window.page.keyboard.press("ArrowLeft")
    await window.page.get_by_role("heading", name="Turn 1 of 3").wait_for()
    assert "turn=" not in window.page.url


async def test_a_new_turn_is_on_the_screen_within_a_second_and_follow_mode_stays_with_it(window: Window) -> None:
    run, page = window.site.running, window.page
    source = f"{window.site.base_url}/api/runs/{run.run_id}/rollouts?status=running"
    adding = asyncio.create_task(run.add_step(turns=12, pause_s=0.2))
    while not (started := (await (await page.request.get(source)).json())["items"]):
        assert not adding.done()
    rollout_id = started[0]["rollout_id"]
    await window.open(f"/runs/{run.run_id}/rollouts/{rollout_id}?follow=1")
    url = f"{window.site.base_url}/api/runs/{run.run_id}/rollouts/{rollout_id}"
    delays_s: list[float] = []
    for _ in range(100):  # whatever the server has, the page has within a second
        num_turns = len((await (await page.request.get(url)).json())["turns"])
        clock = IdleClock()
        await page.wait_for_function("wanted => document.querySelectorAll('.frame').length >= wanted", arg=num_turns)
        delays_s.append(clock.look())
        if num_turns == 12:
            break
    assert median(delays_s) < 1.0  # a single one may fall into a moment in which the tests' machine does something else
    await page.get_by_role("heading", name="Turn 12 of 12").wait_for()
    await adding


async def test_the_list_of_runs_and_the_charts_keep_up_with_a_run(window: Window) -> None:
    run, page = window.site.running, window.page
    await window.open(f"/runs/{run.run_id}?tab=timeline")
    await page.locator(".live-dot.on").wait_for()
    step = run.num_steps + 1
    await run.add_step(turns=1)
    await page.get_by_role("link", name=f"Step {step}", exact=True).wait_for()


async def test_a_person_overrides_a_verdict_with_a_reason_after_signing_in(window: Window) -> None:
    page, rollout = window.page, await _first_rollout(window, 1)
    await window.open(f"/runs/{window.site.ended.run_id}/rollouts/{rollout['rollout_id']}")
    await page.get_by_role("button", name="Override").click()
    await page.get_by_role("button", name="✕ Failure" if rollout["success"] else "✓ Success").click()
    await page.get_by_label("Reason").fill("the screen shows that it was done")
    await page.get_by_label("Your name").fill("Ada")
    await page.get_by_role("button", name="Save verdict").click()
    await page.get_by_label("Access token").fill(WRITE_TOKEN)
    await page.get_by_role("button", name="Sign in and save").click()

    history = page.get_by_test_id("overrides")
    await history.wait_for()
    assert "the screen shows that it was done" in await history.inner_text()
    assert "Ada" in await history.inner_text()
    assert "overridden" in await page.locator(".stats").first.inner_text()
    window.complaints[:] = [one for one in window.complaints if "401" not in one]


async def test_a_rollout_and_a_chart_can_be_taken_away(window: Window, tmp_path: Path) -> None:
    page, rollout = window.page, await _first_rollout(window, 1)
    await window.open(f"/runs/{window.site.ended.run_id}/rollouts/{rollout['rollout_id']}")
    async with page.expect_download() as download:
        await page.get_by_role("link", name="JSON").click()
    await (await download.value).save_as(tmp_path / "rollout.json")
    saved = json.loads((tmp_path / "rollout.json").read_text())
    assert saved["rollout"]["rollout_id"] == rollout["rollout_id"]

    await window.open(f"/runs/{window.site.ended.run_id}")
    await page.locator('figure[aria-label="Reward"]').hover()
    for kind, first_bytes in (("CSV", b"step,reward/mean\n1,"), ("PNG", b"\x89PNG")):
        async with page.expect_download() as download:
            await page.get_by_role("button", name=f"Save Reward as {kind}").click()
        await (await download.value).save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(first_bytes)


async def test_charts_zoom_smooth_and_change_scale(window: Window) -> None:
    page = window.page
    await window.open(f"/runs/{window.site.ended.run_id}")
    plot = page.locator('.chart-plot[aria-label^="Success:"] .u-over')
    await plot.wait_for()
    box = await plot.bounding_box()
    await page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=5)
    await page.mouse.up()
    await page.get_by_role("button", name="Reset zoom").click()
    assert f"/runs/{window.site.ended.run_id}" in page.url  # a drag opens nothing
    await page.get_by_role("button", name="Log scale").click()
    await page.get_by_label("Smoothing").fill("0.6")
    await page.wait_for_url(re.compile(r"smooth=0\.6"))
    assert "log=1" in page.url


async def test_evaluations_of_two_runs_stand_side_by_side_and_lead_to_their_own(window: Window) -> None:
    page, runs = window.page, [window.site.ended.run_id, window.site.running.run_id]
    for run, shift_px in zip(runs, (-6, 6), strict=True):
        answer = await (await page.request.get(f"{window.site.base_url}/api/runs/{run}/evaluations")).json()
        rate = answer[0]["success"]["rate"]
        await window.open(f"/compare?runs={','.join(runs)}")
        plot = page.locator('.chart-plot[aria-label^="Success on held-out tasks: 3 points"] .u-over')
        await plot.wait_for()  # both runs are drawn
        box = await plot.bounding_box()
        # evaluations of steps 0 to 4 with a twentieth of that beside them; 0 to 102 %
        at = {"x": box["width"] * 0.2 / 4.4 + shift_px, "y": box["height"] * (1 - rate / 1.02) - 1}
        await plot.click(position=at)
        await page.wait_for_url(re.compile(rf"/runs/{run}/baseline/0$"))


async def test_everything_can_be_reached_by_keyboard(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open("/")
    await page.locator("[data-row]").first.wait_for()
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Go to").fill("first")
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(rf"/runs/{run}$"))
    await page.get_by_role("tab", name="Charts").wait_for()
    await page.keyboard.press("2")
    await page.locator("[data-row]").first.wait_for()
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(r"/step/4$"))
    await page.get_by_text("Groups and rollouts").wait_for()
    await page.keyboard.press("[")
    await page.wait_for_url(re.compile(r"/step/3$"))
    await page.keyboard.press("?")
    await page.get_by_role("dialog", name="Keyboard").wait_for()
    await page.keyboard.press("Escape")
    await page.keyboard.press("t")
    assert await page.evaluate("document.documentElement.dataset.theme") == "light"
    await page.reload()
    assert await page.evaluate("document.documentElement.dataset.theme") == "light"


async def test_a_page_that_has_shown_a_hundred_addresses_still_shows_the_next(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/runs/{run}?tab=timeline")
    visit = "path => { history.pushState(null, '', path); dispatchEvent(new Event('monitor:navigate')); }"
    for number in range(100):  # more than are kept of what is not on the screen
        await page.evaluate(visit, f"/?q=search-{number}")
        await page.locator("input[type=search]").wait_for()
    await page.evaluate(visit, f"/runs/{run}/step/1")
    await page.locator(".cell").first.wait_for()


async def test_a_rollout_plays_as_a_film_and_a_group_on_one_clock(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    rollout = await _first_rollout(window, 3)
    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}")
    await page.get_by_label("Speed of the film").select_option("4")
    await page.get_by_role("button", name="Play as a film").click()
    await page.get_by_role("heading", name="Turn 3 of 3").wait_for()
    await page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="Group").click()
    await page.get_by_role("slider", name="Time since the group began").wait_for()
    assert await page.locator(".member").count() == 8
    await page.keyboard.press("ArrowLeft")
    await page.wait_for_url(re.compile(r"t="))


async def _press_at_once(window: Window, *keys: str) -> None:
    """Press keys faster than a page is drawn."""
    script = "keys => { for (const key of keys) window.dispatchEvent(new KeyboardEvent('keydown', {key})); }"
    await window.page.evaluate(script, list(keys))


async def test_quick_presses_of_arrow_keys_lose_no_turn_and_no_moment(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    rollout = await _first_rollout(window, 2)
    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}")
    await page.get_by_role("heading", name="Turn 1 of 3").wait_for()
    await _press_at_once(window, "ArrowRight", "ArrowRight")
    await page.get_by_role("heading", name="Turn 3 of 3").wait_for()
    await _press_at_once(window, "ArrowLeft", "ArrowLeft", "ArrowRight")
    await page.get_by_role("heading", name="Turn 2 of 3").wait_for()
    await page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="Group").click()
    await page.get_by_role("slider", name="Time since the group began").wait_for()
    moments: list[str] = []
    for _ in range(2):
        shown = page.url
        await page.keyboard.press("ArrowLeft")
        await page.wait_for_url(partial(ne, shown))
        moments.append(page.url.partition("t=")[2])
    await page.goto(page.url.partition("?")[0])
    await page.get_by_role("slider", name="Time since the group began").wait_for()
    await _press_at_once(window, "ArrowLeft", "ArrowLeft")
    await page.wait_for_url(f"**t={moments[1]}")


async def test_the_next_rollout_of_a_group_opens_at_the_same_turn(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    rollout = await _first_rollout(window, 2)
    await window.open(f"/runs/{run}/rollouts/{rollout['rollout_id']}?turn=2&color=gap")
    await page.get_by_role("heading", name="Turn 2 of 3").wait_for()
    await page.keyboard.press("]")
    await page.get_by_text("2 / 8").wait_for()
    await page.get_by_role("heading", name="Turn 2 of 3").wait_for()
    assert page.url.endswith("?turn=2&color=gap")
    await page.keyboard.press("[")
    await page.wait_for_url(re.compile(rf"{rollout['rollout_id']}\?turn=2"))


async def test_every_page_has_a_title_that_says_which_one_it_is(window: Window) -> None:
    run = window.site.ended.run_id
    rollout = await _first_rollout(window, 1)
    answer = await window.page.request.get(f"{window.site.base_url}/api/runs/{run}/step/1")
    group = (await answer.json())["groups"][0]
    for path, title in {
        "/": "Runs · cua_rl",
        f"/runs/{run}": "first · cua_rl",
        f"/runs/{run}?tab=timeline": "Timeline · first · cua_rl",
        f"/runs/{run}/step/1": "Step 1 · first · cua_rl",
        f"/runs/{run}/step/1/groups/{group['group_id']}": "Group 1 · Step 1 · first · cua_rl",
        f"/runs/{run}/rollouts/{rollout['rollout_id']}": "Rollout 1 · Group 1 · Step 1 · first · cua_rl",
        f"/runs/{run}/tasks/{group['task_id']}": f"{group['task_id']} · Tasks · first · cua_rl",
        f"/rollouts?run_id={run}&view=gallery": "Screens · Rollouts · first · cua_rl",
        "/compare": "Compare · cua_rl",
        "/benchmarks": "Benchmarks · cua_rl",
        "/no/such/page": "Page not found · cua_rl",
    }.items():
        await window.open(path)
        await window.page.wait_for_function("wanted => document.title === wanted", arg=title)
