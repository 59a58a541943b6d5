"""Every page of the web app in real Chromium: it shows what is stored, complains about nothing, all can read it."""

from importlib.resources import files
from typing import Any

import pytest

from tests.real.monitor_web.conftest import NUM_STEPS, ROOT, Site, Window

pytestmark = pytest.mark.asyncio(loop_scope="session")
AXE = files("axe_playwright_python") / "axe.min.js"


async def _pages(window: Window) -> dict[str, str]:
    """An address of every kind of page, and text that is only there when its data are shown."""
    run = window.site.ended.run_id
    step = await window.json(f"/api/runs/{run}/step/1")
    group = step["groups"][0]
    rollout = group["rollouts"][0]["rollout_id"]
    return {
        "/": "first",
        f"/runs/{run}": "Gradient norm",
        f"/runs/{run}?tab=timeline": f"Step {NUM_STEPS}",
        f"/runs/{run}?tab=live": "Its latest rollouts",
        f"/runs/{run}?tab=tasks": group["task_id"],
        f"/runs/{run}?tab=evals": f"Evaluation after {NUM_STEPS} steps",
        f"/runs/{run}?tab=cost": "What each policy took",
        f"/runs/{run}?tab=config": "learning_rate",
        f"/runs/{run}?tab=sql&sql=SELECT+1": "Slowest devices",
        f"/runs/{run}/step/1": group["instruction"],
        f"/runs/{run}/baseline/0": "Groups and rollouts",
        f"/runs/{run}/step/1/groups/{group['group_id']}?t=0.5": "On a common time axis",
        f"/runs/{run}/rollouts/{rollout}?turn=2&token=3": "What the model saw",
        f"/runs/{run}/tasks/{group['task_id']}": "Hardest instances",
        f"/rollouts?run_id={run}&step=1": group["instruction"],
        f"/rollouts?run_id={run}&view=gallery&phase=step&step=1": group["instruction"],
        f"/pair?of={run}/{rollout}&of={run}/{group['rollouts'][1]['rollout_id']}&screens=change": "Two rollouts",
        f"/rollouts?run_id={run}&view=summary": "What validators expected",
        f"/rollouts?run_id={run}&view=tokens": "Outlying tokens",
        f"/rollouts?run_id={run}&view=cost": "Steps and evaluations",
        f"/rollouts?run_id={run}&step=2&against=run_id%3D{run}%26step%3D1": "Compare them",
        f"/compare?first=run_id%3D{run}%26step%3D1&second=run_id%3D{run}%26step%3D2": "Is the difference real?",
        f"/compare?runs={run},{window.site.running.run_id}": "Settings that differ",
        "/benchmarks": "No benchmark yet",
    }


async def _wait_for_data(page: Any, path: str, text: str) -> None:
    await page.get_by_text(text, exact=False).first.wait_for(state="attached")
    if "view=tokens" in path or "against=" in path:  # whose texts are there before their data
        await page.locator("td.mono a, table.rollouts a[data-row]").first.wait_for()


async def test_every_page_shows_its_data_and_can_be_read_by_all(window: Window) -> None:
    await window.page.emulate_media(reduced_motion="reduce")
    found: list[str] = []
    for path, text in (await _pages(window)).items():
        await window.open(path)
        await _wait_for_data(window.page, path, text)
        found += await findings(window.page, path)
    assert found == []


async def test_pages_fit_a_phone_in_the_light_theme(chromium: Any, site: Site, window: Window) -> None:
    context = await chromium.new_context(
        viewport={"width": 390, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    page = await context.new_page()
    found: list[str] = []
    for path, text in (await _pages(window)).items():
        if "tab=" not in path or "timeline" in path:  # the tabs of a run are made of the same parts
            await page.goto(site.base_url + path)
            await _wait_for_data(page, path, text)
            found += await findings(page, path)
    await context.close()
    assert found == []


async def findings(page: Any, path: str) -> list[str]:
    """Serious findings of axe, and whether the page scrolls sideways."""
    await page.evaluate(AXE.read_text())
    result = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    found = [
        f"{path}: {one['id']} at {one['nodes'][0]['html'][:120]}"
        for one in result["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    wider_px = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [*found, f"{path}: {wider_px} px wider than the window"] if wider_px > 0 else found


async def test_what_is_not_there_is_told_with_what_to_do(window: Window) -> None:
    await window.open("/runs/12345")
    await window.page.get_by_text("Nothing found at this address").wait_for()
    await window.page.get_by_role("link", name="All runs", exact=True).click()
    await window.page.get_by_role("heading", name="Runs").wait_for()
    await window.page.get_by_role("searchbox").fill("no run has this name")
    await window.page.get_by_text("Clear the search").wait_for()
    missing = "console: Failed to load resource: the server responded with a status of 404 (Not Found)"
    assert set(window.complaints) == {missing}
    window.complaints.clear()


async def test_a_search_without_a_match_says_so(window: Window) -> None:
    await window.open("/?status=failed&q=first")
    await window.page.get_by_text("No matching run").wait_for()


async def test_the_bundle_is_small_and_allows_a_strict_content_policy() -> None:
    static = ROOT / "cua_rl/monitor/static"
    html = (static / "index.html").read_text()
    assert "<style" not in html
    assert "<script>" not in html
    assert sum(file.stat().st_size for file in static.rglob("*.*") if file.suffix in (".js", ".css")) < 1_200_000
    assert "http" not in html.replace("http-equiv", "")
