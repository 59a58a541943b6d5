"""A judged run in the web app: verdict, votes and prompt beside a rollout, curves of what the judge said and cost."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.events import Event
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.judge import DEFAULT_PROMPT
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rollout.outcome import validation_of
from cua_rl.types.judgement import Judgement, JudgeVote
from cua_rl.types.rollout import Reward, Rollout, RolloutGroup, StopReason
from tests.real.database.recorded import step_end
from tests.real.monitor_web.conftest import Site, Window
from tests.real.monitor_web.runs import WIFI, add_run, begin, begun, finished, group_end, group_of, rollouts_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

JUDGE = JudgeConfig(
    base_url="https://judge.example/v1",
    model="Qwen/Qwen3-VL-235B-A22B-Instruct",
    prompt_text=DEFAULT_PROMPT.read_text(),
    votes=3,
    input_price=0.4,
    output_price=1.6,
)
NOT_THERE = (
    "the judge 'Qwen/Qwen3-VL-235B-A22B-Instruct' at https://judge.example/v1: expected an answer, got "
    "InternalServerError: Error code: 503 - {'error': {'message': 'out of order'}}"
)
NUM_STEPS = 3


def vote(success: bool | None, reason: str = "", **more: Any) -> JudgeVote:
    return JudgeVote(
        success=success, reason=reason, duration_s=2.4, num_prompt_tokens=1843, num_answer_tokens=61, **more
    )


YES = vote(True, "The switch beside “Wi-Fi” is on in the last screenshot, and the list of networks is shown.", score=1)
NO = vote(False, "The page of networks is open, but no network is connected; the switch alone is not what was asked.")
MALFORMED = vote(
    None,
    error="expected one JSON object with reason and success, got 'The task was completed successfully.'",
    is_malformed=True,
    text="The task was completed successfully.",
)
LOST = JudgeVote(success=None, error=NOT_THERE, duration_s=60.0)


def judged(*votes: JudgeVote, decides: bool) -> Judgement:
    return Judgement(
        model=JUDGE.model,
        prompt=JUDGE.prompt_text,
        prompt_sha256=JUDGE.prompt_sha256,
        screenshots="final",
        votes=votes,
        decides=decides,
        duration_s=max(one.duration_s for one in votes),
        cost_usd=JUDGE.cost_usd(votes),
    )


def decided(rollout: Rollout, *votes: JudgeVote) -> Rollout:
    """The rollout as the judge decided it."""
    judgement = judged(*votes, decides=True)
    reward = Reward(total=float(judgement.success is True), parts={"success": float(judgement.success is True)})
    return replace(rollout, judgement=judgement, validation=validation_of(judgement), reward=reward, error=None)


def judged_group(step: int) -> RolloutGroup:
    """One that the judge decides, one beside a validator that found otherwise, one on which it came to no verdict."""
    group = group_of(f"judged-{step}", seed=step, has_fault=True)
    first, second, third = group.rollouts
    assert second.validation is not None
    beside = replace(
        second,
        judgement=judged(YES, YES, NO, decides=False),
        validation=replace(second.validation, success=False, query="settings wifi", expected="on", actual="off"),
        reward=Reward(total=0.0, parts={"success": 0.0}),
    )
    (fault,) = group.faulty
    without = replace(
        fault, judgement=judged(LOST, LOST, MALFORMED, decides=True), stop_reason=StopReason.TASK_ERROR, error=NOT_THERE
    )
    members = (decided(first, YES, NO, YES), beside, decided(third, *[NO, NO, MALFORMED if step == 2 else NO]))
    return replace(group, rollouts=members, faulty=(without,))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    run_id: str
    groups: tuple[RolloutGroup, ...]

    def address(self, rollout: Rollout) -> str:
        return f"/runs/{self.run_id}/rollouts/{rollout.rollout_id}"


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="judged_run")
async def _judged_run(site: Site) -> JudgedRun:
    groups = tuple(judged_group(step) for step in range(1, NUM_STEPS + 1))
    events: list[Event] = [begin("judged", total_steps=NUM_STEPS, judge_model=JUDGE.model, judge="compare")]
    for step, group in enumerate(groups, start=1):
        events += [begun("step", step, WIFI), *rollouts_of("step", step, group, WIFI), group_end("step", step, group)]
        events.append(replace(step_end(group, step), metrics=rollout_metrics([group])))
    run_id = await add_run(site.database_url, *events, finished())
    return JudgedRun(run_id=run_id, groups=groups)


def panel_of(window: Window) -> Any:
    """The judge's panel, whole."""
    return window.page.locator(".panel").filter(has=window.page.get_by_test_id("judgement"))


async def test_a_judges_verdict_is_shown_with_its_votes_its_prompt_and_its_cost(
    window: Window, judged_run: JudgedRun
) -> None:
    await window.open(judged_run.address(judged_run.groups[0].rollouts[0]))
    panel = panel_of(window)
    facts = re.sub(r"\n+", "\n", await window.page.get_by_test_id("judgement").inner_text())
    assert await panel.locator(".panel-head .badge.good").count() == 1
    assert "decides, without a validator" in await panel.locator(".panel-head").inner_text()
    assert f"model\n{JUDGE.model}\n" in facts
    assert f"reason\n{YES.reason}\n" in facts
    assert "agreement\n67 % of 3 votes\n" in facts
    assert "saw\nthe final screenshot\n" in facts
    assert "tokens\n5,529 in, 183 out\n" in facts
    assert "cost\n$0.0025" in facts  # (5529 * 0.4 + 183 * 1.6) / 1e6 = 0.0025044

    votes = panel.locator("li")
    assert await votes.count() == 3
    assert not await votes.first.is_visible()
    await panel.get_by_text("3 votes", exact=True).click()
    assert NO.reason in await votes.nth(1).inner_text()
    assert "score 1" in await votes.first.inner_text()
    assert await votes.nth(1).locator(".badge.bad").count() == 1
    await panel.get_by_text(re.compile("^Prompt")).click()
    assert (await panel.locator("pre").inner_text()).startswith("You decide whether a computer-use agent")


async def test_a_verdict_beside_a_validator_does_not_decide(window: Window, judged_run: JudgedRun) -> None:
    await window.open(judged_run.address(judged_run.groups[0].rollouts[1]))
    panel = panel_of(window)
    assert "beside the validator" in await panel.locator(".panel-head").inner_text()
    assert await panel.locator(".panel-head .badge.good").count() == 1
    validation = window.page.locator(".panel").filter(has=window.page.get_by_role("heading", name="Validation"))
    assert await validation.locator(".panel-head .badge.bad").count() == 1
    outcome = window.page.locator(".stats .stat").filter(has=window.page.get_by_text("Outcome", exact=True))
    assert "failure" in await outcome.inner_text()


async def test_a_rollout_without_verdict_says_why(window: Window, judged_run: JudgedRun) -> None:
    await window.open(judged_run.address(judged_run.groups[0].faulty[0]))
    panel = panel_of(window)
    assert "no verdict" in await panel.locator(".panel-head").inner_text()
    facts = re.sub(r"\n+", "\n", await window.page.get_by_test_id("judgement").inner_text())
    assert f"reason\n{NOT_THERE}\n" in facts
    await panel.get_by_text("3 votes", exact=True).click()
    assert await panel.locator("li").get_by_text("no answer").count() == 2
    assert MALFORMED.error is not None
    malformed = panel.locator("li").nth(2)
    assert MALFORMED.error in await malformed.inner_text()
    assert await malformed.locator("pre").inner_text() == MALFORMED.text


async def test_what_the_judge_said_and_cost_is_drawn_by_step(window: Window, judged_run: JudgedRun) -> None:
    page = window.page
    await window.open(f"/runs/{judged_run.run_id}")
    section = page.locator(".chart-section").filter(has=page.get_by_role("heading", name="Judge", exact=True))
    titles = ["Verdicts", "Rollouts judged", "Wait for the judge", "Cost of the judge", "Tokens of the judge"]
    await section.wait_for()
    for title in reversed(titles):  # drawn as they come into view
        await section.locator(f'figure[aria-label="{title}"]').scroll_into_view_if_needed()
        await section.locator(f'figure[aria-label="{title}"] .u-over').wait_for()
    assert await section.locator("figure").count() == len(titles)
    assert "$0.0083" in await section.locator('figure[aria-label="Cost of the judge"]').inner_text()
    plot = section.locator('figure[aria-label="Verdicts"] .u-over')
    box = await plot.bounding_box()
    await page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    readout = section.locator('figure[aria-label="Verdicts"] .chart-readout')
    await readout.get_by_text(f"step {NUM_STEPS}", exact=True).wait_for()
    metrics = rollout_metrics([judged_run.groups[-1]])
    assert metrics["judge/success_rate"] == pytest.approx(2 / 3)
    assert "67 %" in await readout.inner_text()


@pytest.mark.parametrize("width_px", [390, 1440])
async def test_the_judges_panel_fits_its_page(chromium: Any, site: Site, judged_run: JudgedRun, width_px: int) -> None:
    page = await chromium.new_page(viewport={"width": width_px, "height": 900})
    group = judged_run.groups[0]
    for rollout in (*group.rollouts, *group.faulty):
        await page.goto(site.base_url + judged_run.address(rollout))
        panel = page.locator(".panel").filter(has=page.get_by_test_id("judgement"))
        await panel.wait_for()
        for summary in await panel.locator("summary").all():
            await summary.click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width_px
        inner, outer = await panel.locator("pre").last.bounding_box(), await panel.bounding_box()
        assert inner["x"] >= outer["x"]
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"]
    await page.close()
