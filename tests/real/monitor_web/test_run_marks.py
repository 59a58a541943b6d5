"""Pins and aliases of runs: a click each, and every page calls the run so."""

import pytest

from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, finished, remove, step
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_pin_holds_a_run_above_newer_ones_in_every_order(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    runs = [await add_run(url, begin(f"pin-{name}"), *step(1, prefix=name), finished()) for name in "abc"]
    await window.open("/?q=pin-")
    names = page.locator("table.runs .run-name")
    await names.nth(2).wait_for()
    assert await names.all_inner_texts() == ["pin-c", "pin-b", "pin-a"]
    await page.locator("table.runs tbody tr").nth(2).hover()
    pin = page.get_by_role("button", name="Pin pin-a")
    await pin.click()
    await page.get_by_label("Access token").fill(WRITE_TOKEN)
    assert await violations_of(page) == []
    await page.get_by_role("button", name="Sign in and save").click()
    await page.locator("table.runs tbody tr:first-child .run-name", has_text="pin-a").wait_for()
    assert await names.all_inner_texts() == ["pin-a", "pin-c", "pin-b"]
    await page.get_by_role("button", name="Run", exact=True).click()  # from the last name to the first
    await page.get_by_role("button", name="Run ↓").wait_for()
    assert await names.all_inner_texts() == ["pin-a", "pin-c", "pin-b"]
    await page.get_by_role("button", name="Run ↓").click()
    await page.get_by_role("button", name="Run ↑").wait_for()
    assert await names.all_inner_texts() == ["pin-a", "pin-b", "pin-c"]
    assert await violations_of(page) == []
    await pin.click()
    await page.locator("table.runs tbody tr:nth-child(1) .pin[aria-pressed=false]").wait_for()
    window.complaints[:] = [one for one in window.complaints if "401" not in one]
    await remove(window, runs)


async def test_an_alias_stands_wherever_the_run_is_named_with_its_name_in_the_title(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    runs = [
        await add_run(url, begin(name, size=name), *step(1, prefix=name), finished()) for name in ("plain", "other")
    ]
    (run, other), alias = runs, "the good one"
    rollouts = (await window.json(f"/api/rollouts?run_id={run}&status=completed"))["items"]
    await page.request.post(f"{window.site.base_url}/api/session", data={"token": WRITE_TOKEN})

    await window.open(f"/runs/{run}")
    await page.get_by_role("button", name="Alias").click()
    assert await violations_of(page) == []
    await page.keyboard.type(alias)
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name=alias).wait_for()
    assert "plain" in await page.locator(".page-note").inner_text()
    assert alias in await page.title()
    first = rollouts[0]
    for path in (
        f"/runs/{run}/step/1",
        f"/runs/{run}/step/1/groups/{first['group_id']}",
        f"/runs/{run}/rollouts/{first['rollout_id']}",
        f"/runs/{run}/tasks/{first['task_id']}",
        f"/rollouts?run_id={run}",
        f"/pair?of={run}/{first['rollout_id']}&of={run}/{rollouts[1]['rollout_id']}",
    ):
        await window.open(path)
        crumb = page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name=alias)
        assert await crumb.get_attribute("title") == "plain", path
    await window.open(f"/compare?runs={run},{other}")
    chip = page.locator(".run-chip").filter(has_text=alias)
    assert await chip.get_by_role("link").first.get_attribute("title") == "plain"
    await page.get_by_role("columnheader", name=alias).wait_for()  # of the settings
    await window.open("/?q=good+one")
    row = page.locator("table.runs tbody tr")
    assert await row.get_by_role("link", name=alias).get_attribute("title") == "plain"
    assert "plain" in await row.locator(".run-model").inner_text()
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Go to").fill("good on")
    await page.get_by_role("option", name=alias).wait_for()
    await page.keyboard.press("Escape")

    await window.open(f"/runs/{run}")
    await page.get_by_role("button", name="Alias").click()
    await page.get_by_role("dialog").get_by_role("textbox").fill("")
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name="plain").wait_for()
    await remove(window, runs)
