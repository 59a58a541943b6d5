"""What recipes found out about a run, in the browser: a suite, a step with other settings, checkpoints asked."""

import re
from dataclasses import replace
from typing import Any

import pytest

from cua_rl.types.actions import Click
from tests.real.database.conftest import run_sql
from tests.real.monitor.analyses import asked_result, replay_result, save, suite_result
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import WIFI, add_run, begin, evaluation, finished, remove, step
from tests.real.monitor_web.test_pages import findings

pytestmark = pytest.mark.asyncio(loop_scope="session")
NUM_TASKS = 8


async def _can_be_read_anywhere(window: Window) -> None:
    """By all, at both widths and in both themes."""
    page = window.page
    await page.emulate_media(reduced_motion="reduce")
    found: list[str] = []
    for width_px, theme in ((390, "light"), (1280, "dark")):
        await page.set_viewport_size({"width": width_px, "height": 900})
        await page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        found += await findings(page, f"{page.url} {width_px} {theme}")
    assert found == []


async def test_a_regression_is_seen_with_its_tasks_and_their_rollouts_in_three_clicks(window: Window) -> None:
    page, url, runs = window.page, window.site.database_url, dict[str, str]()
    tasks = [replace(WIFI, task_id=f"task-{number}", seed=number) for number in range(NUM_TASKS)]
    for name in ("week-1", "week-2", "week-3"):
        events = [one for task in tasks for one in evaluation("eval", task.seed, task, name)]
        runs[name] = await add_run(url, begin(f"phone@{name}", "/suites/phone", total_steps=0), *events, finished())
    all_runs = ", ".join(runs.values())
    run_sql(url, f"UPDATE rollouts SET success = true, status = 'completed' WHERE training_id IN ({all_runs})")
    lost = "task_id IN ('task-0', 'task-1', 'task-2', 'task-3', 'task-4')"
    run_sql(url, f"UPDATE rollouts SET success = false WHERE training_id = {runs['week-2']} AND {lost}")
    solved, fallen = [True] * NUM_TASKS, [False] * 5 + [True] * 3
    for name, now, accepted in (("week-2", fallen, "week-1"), ("week-3", solved, "week-3")):
        result = suite_result(solved, now, accepted=accepted, first="week-1", second=name)
        save(url, runs[name], result, kind="suite")

    await window.open(f"/runs/{runs['week-2']}")
    await page.get_by_role("link", name="Regression suite").click()
    told = await page.get_by_test_id("suite-verdict").inner_text()
    assert re.search(r"week-2\s+against week-1", told), told
    assert re.search(r"✕ regression\s+p 0.031, alarm at 0.05", told, re.IGNORECASE), told  # 1 of 2**5
    assert re.search(r"−62.5\s", told), told
    assert re.search(r"5 worse\s+0 better, of 8 tasks", told), told
    assert "accepted now: week-3" in " ".join((await page.locator(".page-note").inner_text()).split())
    rows = page.locator("tbody tr")
    assert [await rows.nth(place).locator("td").first.inner_text() for place in (0, 1)] == ["week-3", "week-2"]
    await page.get_by_role("heading", name="By task").wait_for()
    await _can_be_read_anywhere(window)
    worst = page.locator("tr").filter(has=page.get_by_role("link", name="task-0"))
    assert (await worst.inner_text()).split()[1:6] == ["100", "%", "0", "%", "−100.0"]
    await worst.get_by_role("link", name="0 %", exact=True).click()
    await page.wait_for_url(re.compile(rf"/rollouts\?run_id={runs['week-2']}&phase=eval&task_id=task-0"))
    await page.wait_for_function("() => document.querySelectorAll('table.rollouts a[data-row]').length === 3")

    await page.go_back()
    await page.get_by_role("link", name="week-3").last.click()  # in the table: the comparison of that one
    await page.get_by_test_id("suite-verdict").get_by_text("✓ accepted").wait_for()
    await page.locator("th").get_by_text("week-3").wait_for()
    await remove(window, runs.values())


async def test_other_settings_of_a_step_stand_beside_the_one_taken(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("replayed"), *step(1, prefix="replayed"), finished())
    rollouts: list[Any] = (await window.json(f"/api/rollouts?run_id={run}&step=1"))["items"]
    result = replay_result(rollouts, {"": 1.0, "loss=gspo": -0.5, "learning_rate=0": 0.0})
    save(url, run, result, kind="replay", step=1)

    await window.open(f"/runs/{run}")
    await page.get_by_role("link", name="Step 1, made again").click()
    told = await page.get_by_test_id("replay").inner_text()
    assert "✓ equal" in told
    assert "the same adapter, bit for bit (1,376 numbers)" in told
    panel = page.locator(".panel").filter(has=page.get_by_role("heading", name="What if"))
    variants, tasks, changes = (panel.locator("table.data").nth(place) for place in range(3))
    lines = [" ".join(line.split()) for line in await variants.locator("tbody tr").all_inner_texts()]
    assert [line.split(" ×")[0] for line in lines] == ["as taken 1", "loss=gspo 0.5", "learning_rate=0 0"]
    assert [line.split("× ")[1].split()[0] for line in lines] == ["1", "−1", "–"]
    dots = variants.locator("svg circle")
    assert await dots.count() == 3 * len(rollouts)
    middle = [float(await dots.nth(place).get_attribute("cx")) for place in range(2 * len(rollouts), 3 * len(rollouts))]
    assert middle == [120.0] * len(rollouts)  # nothing changes without a learning rate
    await _can_be_read_anywhere(window)

    await changes.get_by_role("button", name="as taken").click()
    largest = max(one["advantage"] or 0.0 for one in rollouts)
    first = await changes.locator("tbody tr").first.locator("td").nth(3).inner_text()
    assert float(first.replace("−", "-")) == pytest.approx(largest, abs=0.01)
    await tasks.get_by_role("link", name=WIFI.task_id).click()
    await page.wait_for_url(re.compile(rf"/rollouts\?run_id={run}&phase=step&step=1&task_id={WIFI.task_id}"))
    await page.go_back()
    await dots.nth(len(rollouts) - 1).click()  # the last one of a line lies on top
    await page.wait_for_url(re.compile(rf"/runs/{run}/rollouts/{rollouts[-1]['rollout_id']}"))
    await remove(window, [run])


async def test_answers_of_checkpoints_are_drawn_on_the_turn_and_show_how_the_recorded_one_moved(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("asked"), *step(1, prefix="asked"), finished())
    rollout = (await window.json(f"/api/rollouts?run_id={run}&step=1"))["items"][0]["rollout_id"]
    clicks = {"base": [Click(x=4, y=6)], "step 1": [Click(x=20, y=30), Click(x=20, y=30)], "step 2": []}
    place: dict[str, Any] = {"rollout_id": rollout, "kind": "answers"}
    save(url, run, asked_result(rollout, 1, Click(x=20, y=30), clicks), turn_index=0, **place)
    save(url, run, asked_result(rollout, 2, Click(x=1, y=1), {"base": []}), turn_index=1, **place)

    await window.open(f"/runs/{run}")
    await page.get_by_role("link", name=re.compile("^Turn 1 of .* asked$")).click()
    asked = page.get_by_test_id("asked")
    rings = asked.locator(".asked-screen circle[fill=none]")
    where = [(await rings.nth(one).get_attribute("cx"), await rings.nth(one).get_attribute("cy")) for one in range(3)]
    assert where == [("4", "6"), ("20", "30"), ("20", "30")]
    assert await rings.count() == 3
    shown = await asked.locator("tbody tr").all_inner_texts()
    lines = [" ".join(line.replace("\x00", "").split()) for line in shown]
    assert lines[0] == "recorded −1.5 – – tap at 20, 30"
    assert lines[1] == "base −4.5 0 0 of 2 1 × tap at 4, 6 1 × type “ no click”"
    assert lines[2].startswith("step 1 sampled it −3.5 0.001 2 of 3 2 × tap at 20, 30")
    heights = [float(await asked.locator(".asked-curve circle").nth(one).get_attribute("cy")) for one in range(3)]
    assert heights[0] > heights[1] > heights[2]  # each finds it likelier
    await asked.locator("tbody tr").nth(1).hover()
    await asked.locator(".asked-screen circle[opacity='0.12']").nth(1).wait_for(state="attached")
    faded = [await rings.nth(one).get_attribute("opacity") for one in range(3)]
    assert faded == ["1", "0.12", "0.12"]
    await _can_be_read_anywhere(window)
    await asked.get_by_role("link", name="turn 2").click()
    await page.wait_for_url(re.compile(r"turn=2"))
    await asked.get_by_role("link", name="turn 1").wait_for()  # from the one that is shown now
    await remove(window, [run])
