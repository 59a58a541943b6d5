"""The jobs of every day, from the page on which they begin: by mouse with a limit on clicks, and by keyboard alone."""

import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import EvaluationEnded, Event, TurnTaken
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click
from cua_rl.types.rollout import Reward, Rollout, RolloutGroup
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, step_end
from tests.real.monitor.conftest import WRITE_TOKEN
from tests.real.monitor_web.conftest import Site, Window
from tests.real.monitor_web.hands import COUNT_CLICKS, Hand, Keyboard, Mouse
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
    rollouts_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
CLOCK = replace(WIFI, task_id="open_clock", instruction="Open the clock.", category="apps")
WRONG_ICON = Click(x=29, y=41)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """A run of three steps with two tasks, and its control."""

    run_id: str
    wrong_id: str
    """the rollout that tapped a wrong icon"""
    gap_id: str
    """the rollout with the largest gap, at its first token"""


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="seeded")
async def _seeded(site: Site) -> AsyncGenerator[Seeded]:
    first = [_decided("jobs-wifi-1", WIFI, (True,) * 3), _decided("jobs-clock-1", CLOCK, (True,) * 3)]
    wrong = _decided("jobs-clock-2", CLOCK, (False, True, True))
    tapped = _with_first_action(wrong.rollouts[0], WRONG_ICON)
    wrong = replace(wrong, rollouts=(tapped, *wrong.rollouts[1:]))
    second = [_decided("jobs-wifi-2", WIFI, (True,) * 3), wrong]
    third = [_decided("jobs-wifi-3", WIFI, (False,) * 3), _decided("jobs-clock-3", CLOCK, (True,) * 3)]
    gap_id = first[0].rollouts[1].rollout_id
    events = [
        *evaluation("baseline", 0, prefix="jobs"),
        *_step(1, first, gap_id),
        *_step(2, second),
        *_step(3, third),
        *_evaluation(_decided("jobs-eval", WIFI, (False, True, False)), WIFI),
    ]
    run_id = await add_run(site.database_url, begin("jobs", total_steps=3), *events, finished())
    control = [*evaluation("baseline", 0, prefix="control"), *_step(1, [_decided("control-1", WIFI, (True,) * 3)])]
    control += _evaluation(_decided("control-eval", WIFI, (True, True, True)), WIFI)
    other = await add_run(site.database_url, begin("jobs-control", learning_rate=2), *control, finished())
    yield Seeded(run_id=run_id, wrong_id=tapped.rollout_id, gap_id=gap_id)
    run_sql(site.database_url, f"DELETE FROM trainings WHERE id IN ({int(run_id)}, {int(other)})")


def _decided(name: str, task: Task, successes: Sequence[bool]) -> RolloutGroup:
    """A group whose rollouts succeeded or failed like this."""
    group = group_of(name, task, seed=sum(name.encode()))

    def decide(rollout: Rollout, success: bool) -> Rollout:
        assert rollout.validation is not None
        checked = replace(rollout.validation, success=success)
        return replace(rollout, validation=checked, reward=Reward(total=float(success), parts={}), judgement=None)

    return replace(group, rollouts=tuple(map(decide, group.rollouts, successes)))


def _with_first_action(rollout: Rollout, action: Click) -> Rollout:
    first, *others = rollout.turns
    agent = replace(first.agent, action=action, action_error=None)
    return replace(rollout, turns=(replace(first, agent=agent), *others))


def _step(number: int, groups: Sequence[RolloutGroup], gap_id: str = "") -> list[Event]:
    """A trained step of a group of Wi-Fi, and one of the clock."""
    tasks = (WIFI, CLOCK)[: len(groups)]
    events: list[Event] = [replace(begun("step", number), tasks=tasks)]
    logprobs: dict[str, Any] = {}
    for index, (task, group) in enumerate(zip(tasks, groups, strict=True)):
        placed = replace(group, index=index)
        events += [*rollouts_of("step", number, placed, task), group_end("step", number, placed)]
        logprobs |= step_end(placed, number).training_logprobs
    if gap_id:
        (turn, (token, *others)), *turns = logprobs[gap_id]
        logprobs[gap_id] = ((turn, (token - 2.5, *others)), *turns)
    rate = sum(sum(group.rewards) for group in groups) / sum(len(group.rewards) for group in groups)
    trained = replace(step_end(groups[0], number), training_logprobs=logprobs, metrics={"reward/mean": rate})
    return [*events, trained]


def _evaluation(group: RolloutGroup, task: Task) -> list[Event]:
    """An evaluation after step 3 of this group and of one of another task, all of whose rollouts failed."""
    both = replace(begun("eval", 3, task), tasks=(task, HELD_OUT))
    other = replace(_decided(f"{group.group_id}-other", HELD_OUT, (False,) * 3), index=1)
    shown = [*rollouts_of("eval", 3, group, task), group_end("eval", 3, group)]
    shown += [*rollouts_of("eval", 3, other, HELD_OUT), group_end("eval", 3, other)]
    return [both, *shown, EvaluationEnded(source=both.source, metrics={})]


@pytest_asyncio.fixture(loop_scope="session", params=[Mouse, Keyboard], name="hand")
async def _hand(window: Window, request: pytest.FixtureRequest) -> Hand:
    await window.page.emulate_media(reduced_motion="reduce")
    await window.page.add_init_script(COUNT_CLICKS)
    hand: Hand = request.param(page=window.page)
    return hand


async def _open_run(window: Window, hand: Hand, name: str = "jobs") -> None:
    """From the list of runs, where a person begins."""
    await window.open("/")
    await hand.press(window.page.get_by_role("link", name=name, exact=True))
    await window.page.get_by_role("tab", name="Charts").wait_for()


async def _rows(window: Window, number: int) -> Any:
    """The links of a table of rollouts, once it has so many."""
    rows = window.page.locator("table.rollouts a[data-row]")
    await window.page.wait_for_function(
        "wanted => document.querySelectorAll('table.rollouts a[data-row]').length === wanted", arg=number
    )
    return rows


async def test_why_a_step_dipped(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await _open_run(window, hand)
    await hand.point("Success", x=1, y=1 - 0.5 / 1.02, arrows="ArrowLeft")
    await page.wait_for_url(re.compile(r"/step/3$"))
    told = await page.get_by_test_id("step-change").inner_text()
    # 11 of 12 before, 3 of 6 now, with the same tasks: Wi-Fi fell by 1 and the clock rose by 1/6, each half of the step
    assert "−41.7 points, from 91.7 % to 50.0 %: 0.0 because other tasks were drawn, −41.7 because" in told
    panel = page.locator(".panel").filter(has=page.get_by_role("heading", name="Why it changed"))
    await hand.press(panel.get_by_role("link", name=WIFI.task_id))
    rows = await _rows(window, 3)
    await hand.press(rows.first)
    await page.wait_for_url(re.compile(rf"/runs/{seeded.run_id}/rollouts/jobs-wifi-3-"))
    await hand.take_stock(at_most=4)


async def test_a_wrong_icon_on_a_task_that_is_solved_otherwise(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await _open_run(window, hand)
    await hand.view("Tasks")
    row = page.locator("tr").filter(has=page.get_by_role("link", name=CLOCK.task_id, exact=True))
    assert "89 %" in await row.inner_text()  # 8 of 9
    await hand.press(row.get_by_role("link", name=f"1 failure of {CLOCK.task_id}"))
    rows = await _rows(window, 1)
    await hand.press(rows.first)
    await page.wait_for_url(re.compile(rf"/rollouts/{seeded.wrong_id}"))
    mark = page.locator(".filmstrip .frame").first.locator("svg circle").last  # the dot in the middle of the ring
    assert (await mark.get_attribute("cx"), await mark.get_attribute("cy")) == (str(WRONG_ICON.x), str(WRONG_ICON.y))
    await hand.take_stock(at_most=4)


async def test_a_run_against_its_control_with_an_interval(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await window.open("/")
    for name in ("jobs", "jobs-control"):
        await hand.tick(page.get_by_label(f"Compare {name}", exact=True))
    await hand.press(page.get_by_role("button", name="Compare 2"))
    told = await page.get_by_test_id("difference").inner_text()
    assert re.search(r"[+−]?[\d.]+ points\s+95 % interval [+−]?[\d.]+ to [+−]?[\d.]+", told), told
    assert {"jobs", "jobs-control"} <= set(await page.locator(".run-chip a:first-of-type").all_inner_texts())
    await hand.take_stock(at_most=3)
    assert seeded.run_id in page.url


async def test_the_largest_gap_of_a_run(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await _open_run(window, hand)
    await hand.press(page.locator(".page-head").get_by_role("link", name="Rollouts"))
    await page.get_by_role("tab", name="Table", selected=True).wait_for()
    await hand.view("Tokens")
    largest = page.locator("table.data tbody tr").first
    await largest.get_by_text("2.6", exact=True).wait_for()  # 2.5 and the 0.1 of all
    await hand.take_stock(at_most=3)  # it is on the screen; one more shows the token in its turn
    await hand.press(largest.locator("td.mono a"))
    await page.wait_for_url(re.compile(rf"/rollouts/{seeded.gap_id}\?token=0&color=gap"))
    assert "1 of" in await page.get_by_test_id("token-facts").inner_text()
    await hand.take_stock(at_most=4)


async def test_a_failure_is_shared(window: Window, hand: Hand, seeded: Seeded, tmp_path: Path) -> None:
    page = window.page
    await window.open(f"/rollouts?run_id={seeded.run_id}&verdict=failure&phase=step")
    await hand.press((await _rows(window, 4)).first)
    async with page.expect_download() as started:
        await hand.press(page.get_by_role("link", name="HTML", exact=True))
    path = tmp_path / "shared.html"
    await (await started.value).save_as(path)
    assert page.url.rsplit("/", 1)[1] in path.read_text(encoding="utf-8")
    await hand.take_stock(at_most=2)


async def test_a_verdict_is_overridden(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await window.open(f"/rollouts?run_id={seeded.run_id}&verdict=failure&phase=eval")
    await hand.press((await _rows(window, 5)).first)
    await hand.press(page.get_by_role("button", name="Override"))
    await page.get_by_role("button", name="✓ Success", pressed=True).wait_for()  # the other one is meant
    await page.keyboard.type("the switch is on")
    await page.keyboard.press("Tab")
    await page.keyboard.type("Ada")
    await hand.press(page.get_by_role("button", name="Save verdict"))
    await page.get_by_label("Access token").wait_for()  # of whoever has not signed in yet
    await page.keyboard.type(WRITE_TOKEN)
    await page.keyboard.press("Enter")
    told = await page.get_by_test_id("overrides").inner_text()
    assert "the switch is on" in told
    assert "Ada" in told
    await hand.take_stock(at_most=3)
    rollout = await window.json(f"/api{page.url.removeprefix(window.site.base_url)}")
    assert (rollout["success"], rollout["override_success"]) == (False, True)
    window.complaints[:] = [one for one in window.complaints if "401" not in one]


async def test_a_rollout_is_followed_live(window: Window, hand: Hand) -> None:
    page, url = window.page, window.site.database_url
    group = next(one for seed in range(100) if len((one := group_of("live", seed=seed)).rollouts[0].turns) > 1)
    (started, *turns) = _first_rollout(rollouts_of("step", 1, group))
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (begin("jobs-live"), begun("step", 1), started, turns[0]):
            await recorder.record(event)
        await recorder.flush()
        await _open_run(window, hand, "jobs-live")
        await hand.view("Live")
        await hand.press(page.get_by_role("link", name=f"Rollout of {WIFI.instruction}"))
        await page.get_by_role("heading", name="Turn 1 of 1").wait_for()
        await page.evaluate("window.isSame = true")
        await recorder.record(turns[1])
        await recorder.flush()
        await page.get_by_role("heading", name="Turn 2 of 2").wait_for()
        assert await page.evaluate("window.isSame")  # it was not loaded again
        assert await page.locator(".filmstrip .frame").count() == 2
        await hand.take_stock(at_most=3)
        run_id = str(recorder.scope.training_id)
        await page.goto("about:blank")
    run_sql(url, f"DELETE FROM trainings WHERE id = {int(run_id)}")


def _first_rollout(events: Iterable[Event]) -> list[Event]:
    """The start and the turns of the first one."""
    (started, *rest) = events
    turns = [one for one in rest if isinstance(one, TurnTaken)]
    return [started, *(one for one in turns if one.rollout_id == turns[0].rollout_id)]


async def test_failures_of_wi_fi_tasks_in_evaluations_are_found_by_words(
    window: Window, hand: Hand, seeded: Seeded
) -> None:
    page = window.page
    await _open_run(window, hand)
    await hand.press(page.get_by_role("button", name="Go to"))
    await page.keyboard.type("Wi-Fi failures in evaluation")
    found = page.get_by_role("option", name="Failures in evaluations with “wi-fi”")
    await found.wait_for()
    if isinstance(hand, Mouse):
        await hand.press(found)
    else:
        await page.keyboard.press("Enter")
    rows = await _rows(window, 2)
    hrefs = [await rows.nth(place).get_attribute("href") for place in range(2)]
    assert all(f"/runs/{seeded.run_id}/rollouts/jobs-eval-" in href for href in hrefs)
    await hand.take_stock(at_most=3)


async def test_the_advantages_of_one_group(window: Window, hand: Hand, seeded: Seeded) -> None:
    page = window.page
    await _open_run(window, hand)
    await hand.point("Reward", x=0.5, y=0.5, arrows="ArrowRight ArrowRight")
    await page.wait_for_url(re.compile(r"/step/2$"))
    await hand.press(page.get_by_role("link", name=CLOCK.instruction))
    await page.wait_for_url(re.compile(rf"/runs/{seeded.run_id}/step/2/groups/jobs-clock-2$"))
    facts = page.locator(".member .member-facts")
    await facts.nth(2).wait_for()
    shown = [re.search(r"advantage ([+−]?[\d.]+)", text) for text in await facts.all_inner_texts()]
    # rewards 0, 1 and 1 less their mean of 2/3
    assert [one and one.group(1) for one in shown] == ["−0.667", "+0.333", "+0.333"]
    await hand.take_stock(at_most=3)


async def test_dialogs_keep_the_focus_and_give_it_back(window: Window, seeded: Seeded) -> None:
    page, run = window.page, f"/runs/{seeded.run_id}"
    await page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    for path, names in (
        (run, ("Keyboard", "Go to Ctrl K", "Note", "Alias")),
        (f"{run}/rollouts/{seeded.wrong_id}", ("Copy link", "Override", "Note")),
    ):
        await window.open(path)
        for name in names:
            opener = page.get_by_role("button", name=name, exact=True)
            await opener.focus()
            await page.keyboard.press("Enter")
            await _stays_inside(page)
            await page.keyboard.press("Escape")
            await page.get_by_role("dialog").wait_for(state="detached")
            assert await opener.evaluate("one => one === document.activeElement"), f"{name} on {path}"

    await page.keyboard.press("o")  # and where the last button is not enabled yet
    await page.keyboard.type("why")
    await page.keyboard.press("Tab")
    await page.keyboard.type("Ada")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Sign in and save", disabled=True).wait_for()
    await _stays_inside(page)
    window.complaints[:] = [one for one in window.complaints if "401" not in one]


async def _stays_inside(page: Any) -> None:
    """Tab goes round within the dialog, in both directions."""
    dialog = page.get_by_role("dialog")
    stops = await dialog.locator(":is(input, textarea, select, button):enabled, a[href]").count()
    for key in ("Tab", "Shift+Tab"):
        seen: set[int] = set()
        for _ in range(stops + 2):
            await page.keyboard.press(key)
            seen.add(await dialog.evaluate("box => [...box.querySelectorAll('*')].indexOf(document.activeElement)"))
        assert -1 not in seen
        assert len(seen) == stops
