"""Questions about many rollouts: few clicks lead to the set that answers them, and every count leads to its own."""

import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from cua_rl.events import EvaluationEnded, Event, RolloutSource, StepTrained
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import step_end
from tests.real.monitor_web.conftest import NUM_STEPS, Window
from tests.real.monitor_web.runs import (
    HELD_OUT,
    WIFI,
    add_run,
    begin,
    begun,
    evaluation,
    finished,
    group_end,
    group_of,
    remove,
    rollouts_of,
    step,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(kw_only=True)
class Hand:
    """Clicks, counted."""

    num_clicks: int = 0

    async def click(self, locator: Any) -> None:
        await locator.click()
        self.num_clicks += 1


async def _items(window: Window, query: str) -> list[Any]:
    return (await window.json(f"/api/rollouts?{query}&limit=200"))["items"]


async def _rows(window: Window, number: int) -> list[str]:
    """The addresses of the table's rollouts, once it has so many."""
    links = window.page.locator("table.rollouts a[data-row]")
    await window.page.wait_for_function(
        "wanted => document.querySelectorAll('table.rollouts a[data-row]').length === wanted", arg=number
    )
    return [await links.nth(place).get_attribute("href") for place in range(number)]


async def test_failures_of_wi_fi_tasks_in_evaluations_are_three_clicks_away(window: Window) -> None:
    page, hand = window.page, Hand()
    events = [
        *evaluation("baseline", 0, prefix="w"),
        *step(1, task=WIFI, prefix="w"),
        *evaluation("eval", 1, WIFI, "w"),
    ]
    events += evaluation("eval", 2, prefix="w")
    run = await add_run(window.site.database_url, begin("words"), *events, finished())
    lost = [one for one in await _items(window, f"run_id={run}&phase=eval&step=1") if one["success"] is False]
    assert lost

    await window.open(f"/runs/{run}")
    await hand.click(page.get_by_role("link", name="Failures"))
    await hand.click(page.get_by_role("button", name="Evaluations"))
    await page.keyboard.press("/")
    await page.keyboard.type("wi-fi")
    await hand.click(page.get_by_role("tab", name="Table"))
    rows = await _rows(window, len(lost))
    assert {row.rsplit("/", 1)[1] for row in rows} == {one["rollout_id"] for one in lost}
    assert hand.num_clicks <= 3
    await remove(window, [run])


async def test_no_count_leads_to_a_larger_set_than_it_counts(window: Window) -> None:
    page, url = window.page, window.site.database_url
    run = await add_run(url, begin("counted"), *step(1, prefix="counted"), finished())
    mine = (
        f"SELECT min(rollout_pk) FROM validations JOIN rollouts ON rollouts.id = rollout_pk WHERE training_id = {run}"
    )
    run_sql(url, f"UPDATE validations SET actual = '' WHERE rollout_pk = ({mine})")
    await window.open(f"/rollouts?run_id={run}&view=summary")
    await page.locator("tr:has(td:nth-child(3) .clamp-2:empty)").get_by_role("link", name="1").click()
    await _rows(window, 1)

    both, second, *_ = [one["rollout_id"] for one in await _items(window, f"run_id={run}")]
    for rollout, tag in ((both, "one"), (both, "two"), (second, "two")):
        run_sql(
            url,
            "INSERT INTO notes (training_id, rollout_pk, tag, actor) "
            f"SELECT training_id, id, '{tag}', 'Ada' FROM rollouts "
            f"WHERE training_id = {run} AND rollout_id = '{rollout}'",
        )
    await window.open(f"/rollouts?run_id={run}&tag=one&view=summary")
    bars = page.locator(".count-bars li")
    await bars.filter(has_text=re.compile("^one")).get_by_role("link").wait_for()
    assert await bars.filter(has_text=re.compile("^two")).get_by_role("link").count() == 0  # the set of two is larger
    await remove(window, [run])


async def test_a_wrong_final_state_is_three_clicks_from_its_run(window: Window) -> None:
    page, run, hand = window.page, window.site.ended.run_id, Hand()
    await window.open(f"/runs/{run}")
    await hand.click(page.get_by_role("link", name="Failures"))
    bar = page.locator(".count-bars li").filter(has_text="wrong final state")
    count = int(await bar.locator("b").inner_text())
    await hand.click(bar.get_by_role("link"))
    (first, *_) = await _rows(window, count)
    await hand.click(page.locator("table.rollouts a[data-row]").first)
    await page.wait_for_url(re.compile(re.escape(first)))
    rollout = await window.json(f"/api{first}")
    assert (rollout["success"], rollout["stop_reason"]) == (False, "finished")
    assert hand.num_clicks <= 3


async def test_the_largest_gap_of_a_run_is_three_clicks_away(window: Window) -> None:
    page, hand, url = window.page, Hand(), window.site.database_url
    (*before, trained) = step(1, prefix="gap")
    assert isinstance(trained, StepTrained)
    rollout_id, ((turn, logprobs), *others) = list(trained.training_logprobs.items())[1]
    odd = {rollout_id: ((turn, (logprobs[0] - 2.5, *logprobs[1:])), *others)}
    moved = replace(trained, training_logprobs={**trained.training_logprobs, **odd})
    run = await add_run(url, begin("gap"), *before, moved, finished())

    await window.open(f"/runs/{run}")
    await hand.click(page.locator(".page-head").get_by_role("link", name="Rollouts"))
    await hand.click(page.get_by_role("button", name="Gap", exact=True))
    await page.locator("table.rollouts tbody tr").first.get_by_text("2.6").wait_for()  # 2.5 and the 0.1 of all
    await hand.click(page.locator("table.rollouts a[data-row]").first)
    await page.wait_for_url(re.compile(rf"/rollouts/{rollout_id}\?color=gap"))
    assert hand.num_clicks <= 3

    hand = Hand()  # and the token itself
    await window.open(f"/runs/{run}")
    await hand.click(page.locator(".page-head").get_by_role("link", name="Rollouts"))
    await hand.click(page.get_by_role("tab", name="Tokens"))
    await hand.click(page.locator("td.mono a").first)
    facts = await page.get_by_test_id("token-facts").inner_text()
    assert "1 of" in facts
    assert f"/rollouts/{rollout_id}?" in page.url
    assert hand.num_clicks <= 3
    await remove(window, [run])


async def test_every_bar_and_number_of_the_figures_leads_to_a_set_of_its_size(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/rollouts?run_id={run}&view=summary")
    await page.locator(".count-bars a").first.wait_for()
    shown: list[tuple[str, str]] = await page.evaluate(
        """() => [...document.querySelectorAll('.count-bars li:has(a), .stats dd:has(a), td.right:has(a)')].map(one =>
            [one.querySelector('a').getAttribute('href'), (one.querySelector('b') ?? one).textContent])"""
    )
    assert len(shown) > 20
    for address, count in shown:
        if "failure_kind" not in address:  # which counts turns
            found = await window.json(f"/api/rollouts/summary?{urlsplit(address).query}")
            assert found["num_rollouts"] == int(count.replace(",", "")), address

    chart = page.locator('.chart-plot[aria-label^="Success by step"] .u-over')
    box = await chart.bounding_box()
    await chart.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    await page.wait_for_url(re.compile(r"/rollouts\?.*phase=(step|eval|baseline).*step=\d"))


async def test_the_keyboard_alone_leads_from_a_run_to_a_failure(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open_failure_by_keys(run)
    await page.wait_for_url(re.compile(rf"/runs/{run}/rollouts/"))
    await page.keyboard.press("Backspace")
    await page.locator("table.rollouts a[data-row]").first.wait_for()
    await page.keyboard.press("u")
    await page.wait_for_url(re.compile(rf"/runs/{run}$"))
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Go to").fill("settings")
    await page.get_by_role("option", name="Rollouts with “settings”").wait_for()


async def test_a_set_narrows_widens_and_goes_on_page_by_page(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    everything = await _items(window, f"run_id={run}&sort=turns")
    await window.open(f"/rollouts?run_id={run}&sort=turns")
    rows = await _rows(window, 50)
    await page.get_by_role("button", name="Show more").click()
    rows = await _rows(window, min(100, len(everything)))
    assert [row.rsplit("/", 1)[1] for row in rows] == [one["rollout_id"] for one in everything[: len(rows)]]

    await page.get_by_text("All filters").click()
    await page.get_by_label("From step").fill(str(NUM_STEPS))
    await page.keyboard.press("Enter")
    late = await _items(window, f"run_id={run}&sort=turns&min_step={NUM_STEPS}")
    assert 0 < len(late) < 50
    await _rows(window, len(late))
    await page.get_by_role("button", name="Failures").click()
    await page.get_by_role("button", name=f"Remove min_step {NUM_STEPS}").click()
    await _rows(window, 50)
    assert dict(parse_qsl(urlsplit(page.url).query)) == {"run_id": run, "sort": "turns", "verdict": "failure"}
    await page.get_by_role("tab", name="Screens").click()
    await page.wait_for_url(re.compile("view=gallery"))
    await page.wait_for_function("() => document.querySelector('.wall img')?.naturalWidth > 0")


async def test_a_run_against_its_control_is_three_clicks_with_an_interval_and_a_test(window: Window) -> None:
    page, hand, url = window.page, Hand(), window.site.database_url
    tasks = [replace(WIFI, task_id=f"task-{number}", seed=number) for number in range(6)]
    runs: list[str] = []
    for name in ("control", "changed"):
        events = [*evaluation("baseline", 0, prefix=name), *step(1, prefix=name)]
        events += [one for task in tasks[1:] for one in evaluation("eval", task.seed, task, name)]
        runs.append(await add_run(url, begin(name, learning_rate=len(name)), *events, finished()))

    await window.open("/?q=c")
    for name in ("control", "changed"):
        await hand.click(page.get_by_label(f"Compare {name}"))
    await hand.click(page.get_by_role("button", name="Compare 2"))
    told = await page.get_by_test_id("difference").inner_text()
    assert re.search(r"[+−]?[\d.]+ points\s+95 % interval [+−]?[\d.]+ to [+−]?[\d.]+", told), told
    assert hand.num_clicks <= 3
    await page.locator("main label select").first.select_option(label="Training steps 1 to 1")
    await page.wait_for_url(re.compile("at=training"))
    await page.get_by_role("heading", name="By task").wait_for()
    shown = await window.json(f"/api/rollouts/summary?run_id={runs[0]}&phase=step&max_step=1")
    arms = page.locator(".panel section")
    assert f"of {shown['success']['num_rollouts']} rollouts" in await arms.first.inner_text()
    await remove(window, runs)


async def test_any_two_sets_are_compared(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open(f"/rollouts?run_id={run}&phase=step&step=1")
    await page.get_by_role("button", name="Compare…").click()
    await page.get_by_role("button", name="Remove step 1").click()
    await page.get_by_text("All filters").click()
    await page.get_by_label("Step", exact=True).fill("4")
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name="Compare them").click()
    told = await page.get_by_test_id("difference").inner_text()
    found = await window.json(
        f"/api/rollouts/compare?first=run_id%3D{run}%26phase%3Dstep%26step%3D1&second=run_id%3D{run}%26phase%3Dstep%26step%3D4"
    )
    assert f"{abs(100 * found['difference']):.1f} points" in told
    assert await page.locator("table.data tbody tr").count() == len(found["tasks"])


async def test_counts_of_every_page_lead_to_rollouts_that_are_there(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    detail = await window.json(f"/api/runs/{run}/step/1")
    group, task = detail["groups"][0]["group_id"], detail["groups"][0]["task_id"]
    held_out = (await window.json(f"/api/runs/{run}/eval/{NUM_STEPS}"))["groups"][0]["task_id"]
    at_least = {
        "/?q=first": 2,
        f"/runs/{run}": 4,
        f"/runs/{run}?tab=timeline": NUM_STEPS + 2,
        f"/runs/{run}?tab=tasks": 10,
        f"/runs/{run}?tab=evals": 6,
        f"/runs/{run}?tab=live": 1,
        f"/runs/{run}/step/1": 2,
        f"/runs/{run}/eval/{NUM_STEPS}": 3,
        f"/runs/{run}/step/1/groups/{group}": 2,
        f"/runs/{run}/tasks/{task}": 4,
        f"/runs/{run}/tasks/{held_out}": 3,
        f"/compare?runs={run},{window.site.running.run_id}": 4,
    }
    missing: list[str] = []
    for path, number in at_least.items():
        await window.open(path)
        links = page.locator('main a[href^="/rollouts?"]')
        await links.nth(number - 1).wait_for(state="attached")
        for href, text in await links.evaluate_all(
            "all => all.map(one => [one.getAttribute('href'), one.textContent])"
        ):
            found = await window.json(f"/api/rollouts/summary?{urlsplit(href).query}")
            if found["num_rollouts"] == 0 and not re.match(r"(0\b|failures$|3 faults$)", text):
                missing.append(f"{path}: {text!r} leads to {href}")
    assert missing == []


async def test_counts_are_those_of_their_sets_where_rollouts_met_faults_and_others_evaluations(window: Window) -> None:
    page, events = window.page, list[Event]()
    for phase, number, task in (("baseline", 0, HELD_OUT), ("step", 1, WIFI), ("eval", 1, HELD_OUT)):
        group = group_of(f"faulty-{phase}", task, seed=number, has_fault=True)
        events += [
            begun(phase, number, task),
            *rollouts_of(phase, number, group, task),
            group_end(phase, number, group),
        ]
        source = RolloutSource(phase=phase, step=number)
        events.append(step_end(group, number) if phase == "step" else EvaluationEnded(source=source, metrics={}))
    run = await add_run(window.site.database_url, begin("faulty"), *events, finished())
    seen = list[str]()
    for path in (
        *("", "?tab=evals", f"/tasks/{WIFI.task_id}", f"/tasks/{HELD_OUT.task_id}"),
        *("/step/1/groups/faulty-step", "/step/1"),
    ):
        await window.open(f"/runs/{run}{path}")
        links = page.locator('main a[href^="/rollouts?"]')
        await links.first.wait_for()
        for href, text in await links.evaluate_all(
            "all => all.map(one => [one.getAttribute('href'), one.textContent])"
        ):
            if counted := re.search(r"(?:(?:of|/) |^)(\d+)$", text):
                found = await window.json(f"/api/rollouts/summary?{urlsplit(href).query}")
                assert found["num_rollouts"] == int(counted[1]), (path, href, text)
                seen.append(text)
    assert len(seen) >= 8, seen

    await window.open(f"/runs/{run}?tab=tasks")
    row = page.locator("tr").filter(has_text=HELD_OUT.task_id)
    held_out = await row.locator("a.text-link").first.get_attribute("href")
    assert dict(parse_qsl(urlsplit(held_out).query)) == {
        "run_id": run, "task_id": HELD_OUT.task_id, "phase": "eval", "step": "1"
    }  # fmt: skip
    await remove(window, [run])


async def test_rollouts_of_two_runs_are_one_set(window: Window) -> None:
    page, runs = window.page, [window.site.ended.run_id, window.site.running.run_id]
    await window.open(f"/rollouts?run_id={runs[0]}&phase=baseline")
    await page.get_by_label("Add a run").select_option(label="second")
    await page.wait_for_url(re.compile(rf"run_id={runs[1]}"))
    await _rows(window, 16)  # eight each
    assert {"first", "second"} <= set(await page.locator(".page-note a").all_inner_texts())
