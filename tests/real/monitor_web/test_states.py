"""Runs that died, end, or went on after a restart: what time is left, what is under way, in which order it ran."""

import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import TrainingEnded
from tests.real.database.recorded import IMAGE_TOKEN
from tests.real.monitor.conftest import serving
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import (
    add_run,
    asynchronous,
    begin,
    begun,
    evaluation,
    fall_silent,
    finished,
    group_of,
    move_times,
    rollouts_of,
    set_times,
    step,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _stats(window: Window) -> str:
    return await window.page.locator("dl.stats").first.inner_text()


async def test_a_dead_run_has_no_time_left_and_nothing_under_way(window: Window) -> None:
    page, url = window.page, window.site.database_url
    left_open = group_of("left-open", seed=5)
    events = (*step(1, prefix="dead"), begun("step", 2), *rollouts_of("step", 2, left_open))
    run = await add_run(url, begin("dead", total_steps=4), *events)
    fall_silent(url, run, minutes=9)

    await window.open(f"/runs/{run}?tab=live")
    await page.get_by_text("no sign of life").first.wait_for()
    stats = await _stats(window)
    assert "Time left" not in stats
    assert "3 running" not in stats
    assert "Last sign of life\n9 min ago" in stats.replace("\n\n", "\n")
    assert await page.get_by_role("tab", name="Live").inner_text() == "Live"
    await page.get_by_text("Its latest rollouts").wait_for()
    assert await page.locator(".badge.running").count() == 0

    await page.get_by_role("tab", name="Timeline").click()
    await page.get_by_role("link", name="Step 2").wait_for()
    assert await page.locator(".badge.running").count() == 0
    await page.get_by_role("link", name="Step 2").click()
    await page.get_by_text("Groups and rollouts").wait_for()
    assert await page.locator(".badge.running").count() == 0
    await page.locator(".cell").first.click()
    await page.get_by_text("What the model saw").wait_for()
    assert await page.locator(".stats .badge.running").count() == 0
    assert await page.get_by_role("button", name="Follow").count() == 0

    await window.open("/?q=dead")
    row = await page.locator("tbody tr").filter(has_text="dead").first.inner_text()
    assert "left" not in row
    assert "last seen 9 min ago" in row


async def test_a_page_left_open_notices_that_its_run_fell_silent(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("quiet", total_steps=4), *step(1, prefix="quiet"))
    await page.clock.install()
    await window.open(f"/runs/{run}")
    await page.get_by_text("Time left").wait_for()
    fall_silent(url, run, minutes=2)
    await page.clock.fast_forward(61_000)  # nothing is announced when a process is killed
    await page.get_by_text("no sign of life").first.wait_for()
    assert "Time left" not in await _stats(window)


async def test_the_final_evaluation_is_no_time_left_of_zero_milliseconds(window: Window) -> None:
    page, url = window.page, window.site.database_url
    events = [*step(1, prefix="last"), begun("eval", 1), *rollouts_of("eval", 1, group_of("last-eval", seed=8))]
    run = await add_run(url, begin("last-evaluation", total_steps=1), *events)
    await window.open(f"/runs/{run}")
    stats = await _stats(window)
    assert "Time left\n0 ms" not in stats.replace("\n\n", "\n")
    assert "final evaluation" in stats
    await window.open("/?q=last-evaluation")
    await page.get_by_role("link", name="last-evaluation").wait_for()
    row = await page.locator("tbody tr").filter(has_text="last-evaluation").inner_text()
    assert "0 ms" not in row
    assert "all steps done" in row


async def test_how_long_ago_an_ended_run_was_counts_from_its_end(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("ended-lately", total_steps=1), *step(1, prefix="lately"), finished())
    move_times(url, run, started_minutes=130, ended_minutes=8)
    await window.open(f"/runs/{run}")
    stats = await _stats(window)
    assert "2 h 02 min" in stats
    assert "ended 8 min ago" in stats
    await window.open("/?q=ended-lately")
    await page.get_by_role("link", name="ended-lately").wait_for()
    assert "ended 8 min ago" in await page.locator("tbody tr").filter(has_text="ended-lately").inner_text()


async def test_a_resumed_run_shows_where_it_started_again(window: Window) -> None:
    page, url = window.page, window.site.database_url
    events = [*evaluation("baseline", 0, prefix="resumed"), *step(1, prefix="resumed"), begun("step", 2)]
    run = await add_run(url, begin("resumed"), *events)
    fall_silent(url, run, minutes=180)
    again = [*step(2, prefix="again"), *evaluation("eval", 2, prefix="again")]
    assert await add_run(url, begin("resumed", first_step=2), *again, finished()) == run
    set_times(
        url, run, {("baseline", 0): (190, 185), ("step", 1): (185, 180), ("step", 2): (0, -5), ("eval", 2): (-5, -9)}
    )

    await window.open(f"/runs/{run}?tab=timeline")
    await page.get_by_role("link", name="Step 2").wait_for()
    rows = [(await row.inner_text()).split("\t")[0].strip() for row in await page.locator("tbody tr").all()]
    assert rows == [
        "Evaluation after 2 steps",
        "Step 2",
        "Resumed at step 2, 3 h 00 min after it was interrupted",
        "Step 1",
        "Baseline",
    ]
    assert await page.locator(".run-clock-restart").count() == 1
    # three hours in which nothing ran take no room: what ran fills most of the clock
    shares = await page.locator(".run-clock-item").evaluate_all(
        "items => items.map(item => item.getBoundingClientRect().width / item.parentElement.clientWidth)"
    )
    assert sum(shares) > 0.5


async def test_steps_of_an_asynchronous_run_are_in_order_and_overlap_in_lanes(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("side-by-side", max_steps_off_policy=1), *asynchronous(4), finished())
    set_times(url, run, {("step", number): (20 - number + (number > 1), 18 - number) for number in range(1, 5)})
    await window.open(f"/runs/{run}?tab=timeline")
    await page.get_by_role("link", name="Step 4").wait_for()
    names = await page.locator("tbody tr a[data-row]").all_inner_texts()
    assert names == ["Step 4", "Step 3", "Step 2", "Step 1"]
    boxes = await page.locator(".run-clock-item").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right, box.top, box.bottom])"
    )
    assert len({top for _, _, top, _ in boxes}) > 1
    for place, (left, right, top, bottom) in enumerate(boxes):
        for other_left, other_right, other_top, other_bottom in boxes[:place]:
            apart = right <= other_left + 2 or other_right <= left + 2 or bottom <= other_top or other_bottom <= top
            assert apart, "two steps cover each other"


async def test_a_page_whose_run_and_monitor_have_ended_says_so(window: Window) -> None:
    page, url = await window.page.context.new_page(), window.site.database_url
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (begin("ends-here", total_steps=1), *step(1, prefix="ends")):
            await recorder.record(event)
        await recorder.flush()
        async with serving(url) as port:
            await page.goto(f"http://127.0.0.1:{port}/runs/{recorder.scope.training_id}")
            await page.locator(".live-dot.on").wait_for()
            await recorder.record(TrainingEnded(status="completed"))
            await recorder.flush()
            await page.get_by_text("completed").first.wait_for()
    await page.get_by_text("run ended, monitor off").wait_for()
    assert await page.get_by_text("trying again").count() == 0


async def test_a_page_whose_monitor_died_says_how_to_see_the_run_again(window: Window) -> None:
    page, url = await window.page.context.new_page(), window.site.database_url
    run = await add_run(url, begin("goes-on", total_steps=4), *step(1, prefix="goes-on"))
    await page.clock.install()
    async with serving(url) as port:
        await page.goto(f"http://127.0.0.1:{port}/runs/{run}")
        await page.locator(".live-dot.on").wait_for()
    await page.get_by_text("offline, trying again").wait_for()
    await page.clock.fast_forward(5 * 60_000)
    await page.get_by_text("monitor off").wait_for()
    assert "make monitor" in str(await page.get_by_text("monitor off").locator("..").get_attribute("title"))
    async with serving(url, port):
        await page.clock.fast_forward(60_000)
        await page.locator(".live-dot.on").wait_for()
