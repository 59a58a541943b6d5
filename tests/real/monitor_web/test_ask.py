"""Queries in SQL from a run's page: few clicks lead to a table, a chart and the rollouts behind them."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.real.database.conftest import run_sql
from tests.real.monitor_web.conftest import NUM_STEPS, Window
from tests.real.monitor_web.test_sets import Hand

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _result(window: Window) -> Any:
    return window.page.get_by_role("table", name="Result")


async def test_success_per_task_and_step_is_a_chart_and_a_table_after_two_clicks(window: Window) -> None:
    page, run, hand = window.page, window.site.ended.run_id, Hand()
    await window.open(f"/runs/{run}")
    await hand.click(page.get_by_role("tab", name="SQL"))
    await hand.click(page.get_by_role("button", name="Success per task and step"))

    await page.get_by_role("figure", name="success by step").wait_for()
    rates = "SELECT step, rollouts.task_id, avg(success::int)::float8 FROM rollouts "
    rates += "JOIN groups ON groups.id = group_pk JOIN steps ON steps.id = step_id "
    rates += f"WHERE rollouts.training_id = {run} AND rollouts.status = 'completed' GROUP BY 1, 2 ORDER BY 1, 2"
    stored = run_sql(window.site.database_url, rates)
    await page.get_by_text(f"{len(stored)} rows in").wait_for()
    cells = await _result(window).locator("tbody tr").first.locator("td").all_inner_texts()
    assert (cells[0], cells[2]) == (str(stored[0][0]), stored[0][1])
    assert {step for step, *_ in stored} == set(range(1, NUM_STEPS + 1))
    assert hand.num_clicks <= 2


async def test_the_rollout_with_the_largest_gap_is_three_clicks_away(window: Window) -> None:
    page, run, hand = window.page, window.site.ended.run_id, Hand()
    await window.open(f"/runs/{run}")
    await hand.click(page.get_by_role("tab", name="SQL"))
    await hand.click(page.get_by_role("button", name="Largest gaps"))
    await hand.click(_result(window).locator("a[data-row]").first)
    await page.wait_for_url(re.compile(rf"/runs/{run}/rollouts/"))
    found = page.url.rsplit("/", 1)[1]
    largest = run_sql(
        window.site.database_url,
        f"SELECT max_gap = (SELECT max(max_gap) FROM rollouts WHERE training_id = {run}) FROM rollouts "
        f"WHERE rollout_id = '{found}'",
    )
    assert largest == [(True,)]
    assert hand.num_clicks <= 3


async def test_a_query_is_written_run_charted_and_saved_by_keyboard(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/runs/{run}")
    await page.get_by_role("tab", name="Charts").wait_for()
    await page.keyboard.press("9")
    await page.get_by_role("textbox", name="SQL").focus()
    await page.keyboard.press("Control+a")
    await page.keyboard.type("SELECT stop_reason, count(*) AS rollouts FROM rollouts GROUP BY stop_reason")
    await page.keyboard.press("Control+Enter")
    bars = page.locator(".count-bars li")
    await bars.first.wait_for()
    counts = run_sql(window.site.database_url, "SELECT stop_reason, count(*) FROM rollouts GROUP BY stop_reason")
    texts = [" ".join((await bar.inner_text()).split()) for bar in await bars.all()]
    assert sorted(texts) == sorted(f"{reason or 'null'} {count}" for reason, count in counts)

    await page.get_by_role("textbox", name="Name for this query").focus()
    await page.keyboard.type("my stops")
    await page.keyboard.press("Enter")
    await page.goto(f"{window.site.base_url}/runs/{run}?tab=sql")
    await page.get_by_role("button", name="my stops", exact=True).focus()
    await page.keyboard.press("Enter")
    await bars.first.wait_for()
    await page.get_by_role("button", name="Delete my stops").click()
    assert await page.get_by_role("button", name="my stops", exact=True).count() == 0


async def test_texts_of_a_saved_result_are_no_formulas_and_numbers_stay_numbers(window: Window, tmp_path: Path) -> None:
    page, run = window.page, window.site.ended.run_id
    sql = """SELECT '=HYPERLINK("http://evil")' AS a, -2.5 AS b, '@x' AS c, '-7' AS d"""
    await window.open(f"/runs/{run}?tab=sql&sql={quote(sql)}")
    await page.get_by_role("button", name="Run", exact=True).click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Save as CSV").click()
    await (await download.value).save_as(tmp_path / "saved.csv")
    assert (tmp_path / "saved.csv").read_text() == """a,b,c,d\n"'=HYPERLINK(""http://evil"")",-2.5,'@x,-7\n"""


async def test_a_link_fills_a_query_in_and_does_not_run_it(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    asked: list[str] = []
    page.on("request", lambda request: request.method == "POST" and asked.append(request.url))
    sql = "SELECT 7 AS n, 'b' AS s UNION ALL SELECT 8, 'c'"
    await window.open(f"/runs/{run}?tab=sql&sql={quote(sql)}")
    assert await page.get_by_role("textbox", name="SQL").input_value() == sql
    assert asked == []
    await page.get_by_role("button", name="Run", exact=True).click()
    await _result(window).get_by_text("8").wait_for()


async def test_a_mistake_is_shown_with_its_line_and_a_long_query_can_be_stopped(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/runs/{run}?tab=sql")
    editor = page.get_by_role("textbox", name="SQL")
    await editor.fill("SELECT 1\nFROM nothing")
    await editor.press("Control+Enter")
    await page.get_by_role("alert").get_by_text('relation "nothing" does not exist (line 2)').wait_for()
    await editor.fill("SELECT count(*) FROM generate_series(1, 100000) AS a, generate_series(1, 1000000) AS b")
    await editor.press("Control+Enter")
    await page.get_by_role("button", name="Stop").click()
    await editor.fill("SELECT 5 AS five")
    await editor.press("Control+Enter")
    await _result(window).get_by_text("five").wait_for()
    window.complaints[:] = [one for one in window.complaints if "422" not in one]


async def test_names_of_the_schema_are_added_to_the_query(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/runs/{run}?tab=sql&sql=SELECT")
    await page.locator("summary").get_by_text("trainings", exact=True).click()
    await page.get_by_role("button", name="run_name").click()
    await page.get_by_role("textbox", name="SQL").press("Control+Enter")
    assert await page.get_by_role("textbox", name="SQL").input_value() == "SELECT run_name"
    await page.get_by_role("alert").wait_for()
    window.complaints[:] = [one for one in window.complaints if "422" not in one]
