"""Finding things: by what people type, not by how ids are spelled; and only what there is."""

import re

import pytest

from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, evaluation, finished, remove, step

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _searchable(window: Window, name: str) -> str:
    events = [*evaluation("baseline", 0, prefix=name), *step(1, prefix=name), *step(2, prefix=name)]
    events += evaluation("eval", 2, prefix=name)
    return await add_run(window.site.database_url, begin(name, total_steps=2), *events, finished())


async def _offers(window: Window, text: str) -> list[str]:
    """What the palette offers, once it has an answer for this text."""
    page = window.page
    await page.get_by_role("combobox", name="Go to").fill(text)
    await page.locator('.palette-list[aria-busy="false"]').wait_for()
    return await page.get_by_role("option").all_inner_texts()


@pytest.mark.parametrize("text", ["wi-fi", "Wifi on", "wireless network"])
async def test_a_task_is_found_by_its_words_however_they_are_spelled(window: Window, text: str) -> None:
    page, run = window.page, await _searchable(window, f"spelled-{len(text)}")
    await window.open(f"/runs/{run}")
    await page.keyboard.press("Control+k")
    assert any("settings_wifi_on" in offer for offer in await _offers(window, text))
    await page.keyboard.press("Escape")
    await window.open(f"/runs/{run}?tab=tasks")
    await page.get_by_label("Find a task").fill(text)
    await page.get_by_role("link", name="settings_wifi_on", exact=True).wait_for()
    assert await page.locator("tbody tr").count() == 1


async def test_tasks_of_evaluations_are_listed_and_found(window: Window) -> None:
    page, run = window.page, await _searchable(window, "held-out-too")
    await window.open(f"/runs/{run}?tab=tasks")
    await page.get_by_role("link", name="held_out_bluetooth").wait_for()
    await page.get_by_role("button", name="Training").click()
    assert await page.locator("tbody tr td:first-child a").all_inner_texts() == ["settings_wifi_on"]
    await page.get_by_role("group", name="Tasks shown").get_by_role("button", name="Held-out").click()
    assert await page.locator("tbody tr td:first-child a").all_inner_texts() == ["held_out_bluetooth"]
    await page.keyboard.press("Control+k")
    assert any("held_out_bluetooth" in offer for offer in await _offers(window, "headphones"))
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(r"/tasks/held_out_bluetooth$"))


async def test_a_number_leads_only_to_steps_and_evaluations_that_exist(window: Window) -> None:
    page, run = window.page, await _searchable(window, "numbers")
    await window.open(f"/runs/{run}")
    await page.keyboard.press("Control+k")
    steps = {number: await _offers(window, str(number)) for number in (1, 2, 7)}
    of_run = {number: [one.split("\n")[0] for one in found if "this run" in one] for number, found in steps.items()}
    assert {number: found.pop() for number, found in of_run.items()} == {
        one: f"Rollouts with “{one}”" for one in of_run
    }
    assert of_run == {1: ["Step 1"], 2: ["Step 2", "Evaluation after 2 steps"], 7: []}
    assert any("Baseline" in offer for offer in await _offers(window, "baseline"))


async def test_runs_beyond_the_newest_are_found_by_name(window: Window) -> None:
    page, url = window.page, window.site.database_url
    old = await add_run(url, begin("needle-in-the-past"), finished())
    newer = [await add_run(url, begin(f"hay-{number}"), finished()) for number in range(55)]  # more than a page of runs
    await window.open("/")
    await page.keyboard.press("Control+k")
    assert any("needle-in-the-past" in offer for offer in await _offers(window, "needle"))
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(rf"/runs/{old}$"))
    await remove(window, newer)


async def test_words_for_verdicts_and_phases_mean_a_set(window: Window) -> None:
    page, run = window.page, await _searchable(window, "meant")
    await window.open(f"/runs/{run}")
    await page.keyboard.press("Control+k")
    for text, label, query in (
        ("failures", "Failures", "verdict=failure"),
        ("Wi-Fi in training", "Rollouts in training with “wi-fi”", "phase=step&search=wi-fi"),
        ("faults of the baseline", "Faults in the baseline", "verdict=fault&phase=baseline"),
    ):
        assert f"{label}\nthis run" in await _offers(window, text)
        await page.get_by_role("option").filter(has=page.get_by_text(label, exact=True)).click()
        await page.wait_for_url(re.compile(rf"/rollouts\?run_id={run}&{query}$"))
        await page.go_back()
        await page.get_by_role("tab", name="Charts").wait_for()
        await page.keyboard.press("Control+k")
    assert not any(offer.startswith("Failures") for offer in await _offers(window, "wireless"))
    await remove(window, [run])
