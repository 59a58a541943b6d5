"""Several runs on one page: who is who, and how many fit."""

import re

import pytest

from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, evaluation, finished, remove, step
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_runs_with_one_name_are_told_apart_and_lead_to_their_own(window: Window) -> None:
    page, url = window.page, window.site.database_url
    short = await add_run(url, begin("run", "/home/ada/runs/run", seed=1), *step(1, prefix="ada"), finished())
    long = await add_run(
        url, begin("run", "/home/bob/runs/run", seed=2), *step(1, prefix="bob"), *step(2, prefix="bob"), finished()
    )
    await window.open(f"/compare?runs={short},{long}")
    reward = page.locator('.chart-plot[aria-label^="Reward: 3 points"] .u-over')
    await reward.wait_for()

    names = await page.locator(".run-chip a:first-of-type").all_inner_texts()
    assert len(set(names)) == 2, names
    assert "ada" in names[0]
    assert "bob" in names[1]
    keys = page.locator('figure[aria-label="Reward"] .chart-key')
    assert [name in await keys.nth(place).inner_text() for place, name in enumerate(names)] == [True, True]
    columns = await page.locator("table.config th").all_inner_texts()
    assert columns[1:] == names

    box = await reward.bounding_box()
    await reward.click(position={"x": box["width"] - 2, "y": box["height"] / 2})  # only the second run has a step 2
    await page.wait_for_url(re.compile(r"/step/2$"))
    assert f"/runs/{long}/" in page.url


async def test_a_run_s_held_out_success_leads_to_the_evaluation_that_has_it(window: Window) -> None:
    page, url = window.page, window.site.database_url
    evaluated = await add_run(url, begin("evaluated"), *evaluation("eval", 0, prefix="evaluated"), finished())
    before = await add_run(url, begin("before"), *evaluation("baseline", 0, prefix="before"), finished())
    await window.open(f"/compare?runs={evaluated}")
    chart = page.get_by_role("figure", name="Success on held-out tasks")
    await chart.locator("canvas").wait_for()
    await chart.locator(".chart-plot").focus()
    await page.keyboard.press("ArrowRight")
    await page.set_viewport_size({"width": 1000, "height": 900})  # the chart is drawn anew, and the cursor stays
    await page.wait_for_function("() => document.querySelector('.u-over').clientWidth < 500")
    assert "step 0" in await chart.locator("figcaption").inner_text()
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(rf"/runs/{evaluated}/eval/0$"))
    await window.open(f"/compare?runs={before}")
    chip = page.locator(".run-chip a.num")
    assert await chip.get_attribute("href") == f"/rollouts?run_id={before}&phase=baseline&step=0"
    assert "%" in await chip.inner_text()
    await remove(window, [evaluated, before])


async def test_lists_of_runs_to_choose_from_tell_runs_with_one_name_apart(window: Window) -> None:
    page, url = window.page, window.site.database_url
    for folder in ("/data/one/twin", "/data/two/twin"):
        await add_run(url, begin("twin", folder), finished())
    for path, choices in (
        ("/compare", page.get_by_label("Add a run").locator("option")),
        (f"/runs/{window.site.ended.run_id}?tab=config", page.get_by_label("compare with").locator("option")),
    ):
        await window.open(path)
        await choices.filter(has_text="twin").nth(1).wait_for(state="attached")
        names = await choices.filter(has_text="twin").all_inner_texts()
        assert len(names) == 2
        assert len(set(names)) == 2, names
    await window.open("/?q=twin")
    await page.locator("tbody tr").nth(1).wait_for()
    rows = await page.locator("tbody tr .run-model").all_inner_texts()
    assert ["one/twin" in rows[1], "two/twin" in rows[0]] == [True, True], rows


async def test_more_runs_than_fit_are_named_and_none_disappears_silently(window: Window) -> None:
    page, url = window.page, window.site.database_url
    runs = [await add_run(url, begin(f"many-{number}"), *step(1, prefix=f"many-{number}")) for number in range(10)]
    await window.open(f"/compare?runs={','.join(runs)}")
    await page.locator(".run-chip").first.wait_for()
    assert await page.locator(".run-chip").count() == 8
    told = await page.get_by_role("status").filter(has_text="8 of 10").inner_text()
    assert "many-8" in told
    assert "many-9" in told
    keys = page.locator('figure[aria-label="Reward"] .chart-key')
    await keys.nth(7).wait_for()  # all eight have a value in the legend


async def test_the_settings_of_a_single_run_are_not_called_differences(window: Window) -> None:
    page, site = window.page, window.site
    for runs, title in (
        (site.ended.run_id, "Settings"),
        (f"{site.ended.run_id},{site.running.run_id}", "Settings that differ"),
    ):
        await window.open(f"/compare?runs={runs}")
        await page.get_by_role("heading", name=title, exact=True).wait_for()
    times = page.locator('figure[aria-label="Step time"]')
    await times.scroll_into_view_if_needed()
    assert re.search(r"\d s", await times.inner_text())  # with the unit that the run's own page has


async def test_a_line_across_the_settings_leads_to_its_run(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    settings = {"slow": {"learning_rate": 1e-5}, "fast": {"learning_rate": 1e-3, "loss": "ppo"}, "new": {"rank": 8}}
    runs = {
        name: await add_run(
            url,
            begin(f"tried-{name}", **config),
            *step(1, prefix=name),
            *(evaluation("eval", 1, prefix=name) if name != "new" else ()),
            finished(),
        )
        for name, config in settings.items()
    }
    await window.open("/compare?q=tried-")
    lines = page.locator(".parallel a")
    await lines.nth(2).wait_for(state="attached")
    axes = page.locator(".parallel .name")
    assert await axes.all_text_contents() == [f"{name}{name}" for name in _AXES]  # each with its title
    ends = page.locator(".parallel .axis").last
    assert "none yet" in await ends.text_content()  # "new" was not evaluated

    fast = page.get_by_role("link", name="tried-fast, held-out success")
    middle = await fast.locator("path").last.evaluate(
        "path => { const at = path.getPointAtLength(path.getTotalLength() / 2).matrixTransform(path.getScreenCTM());"
        " return [at.x, at.y]; }"
    )
    await page.mouse.move(*middle)
    told = page.locator(".parallel-told")
    await told.get_by_text("tried-fast").wait_for()
    assert "learning_rate 0.001" in await told.inner_text()
    assert "loss ppo" in await told.inner_text()
    assert await violations_of(page) == []

    await page.get_by_text("Axes").click()
    await page.get_by_label("rank").uncheck()
    await page.wait_for_url(re.compile(r"axes="))
    assert await violations_of(page) == []
    await page.reload()  # the choice is in the address
    await lines.nth(2).wait_for(state="attached")
    assert await axes.count() == len(_AXES) - 1
    await fast.focus()
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(rf"/runs/{runs['fast']}$"))

    await window.open(f"/compare?runs={runs['slow']},{runs['fast']}")
    await lines.nth(1).wait_for(state="attached")
    assert await axes.all_text_contents() == [f"{name}{name}" for name in ("learning_rate", "loss", "held-out success")]
    await remove(window, runs.values())


_AXES = ("learning_rate", "loss", "rank", "held-out success")
