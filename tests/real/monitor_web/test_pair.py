"""Two rollouts side by side: from the first turn in which they differ, with their tokens and images."""

import re
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from PIL import Image, ImageChops
from playwright.async_api import expect

from cua_rl.types.rollout import Rollout, RolloutGroup
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, begun, finished, group_end, group_of, remove, rollouts_of
from tests.real.monitor_web.test_sets import Hand

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _alike(name: str) -> RolloutGroup:
    """The second rollout is the first up to its third turn, of which the second token is another."""
    group = group_of(name, seed=SEED)
    first = group.rollouts[0]
    turn = first.turns[2]
    tokens = (turn.model.sampled_tokens[0], turn.model.sampled_tokens[1] + 1, *turn.model.sampled_tokens[2:])
    other = replace(turn, model=replace(turn.model, sampled_tokens=tokens))
    second = replace(first, rollout_id=f"{name}-second", member_index=1, turns=(*first.turns[:2], other))
    return replace(group, rollouts=(first, second, *group.rollouts[2:]))


def _is_long(rollout: Rollout) -> bool:
    return len(rollout.turns) > 2 and len(rollout.turns[2].model.sampled_tokens) > 1


SEED = next(seed for seed in range(100) if _is_long(group_of("any", seed=seed).rollouts[0]))


async def test_two_rollouts_of_a_group_stand_side_by_side_after_three_clicks(window: Window) -> None:
    page, hand, url = window.page, Hand(), window.site.database_url
    group = _alike("pair")
    run = await add_run(
        url, begin("pair"), begun("step", 1), *rollouts_of("step", 1, group), group_end("step", 1, group), finished()
    )
    await window.open(f"/runs/{run}/step/1/groups/{group.group_id}")
    await hand.click(page.get_by_role("checkbox", name="Choose rollout 1"))
    await hand.click(page.get_by_role("checkbox", name="Choose rollout 2"))
    await hand.click(page.get_by_role("link", name="Side by side"))
    assert hand.num_clicks <= 3
    await page.get_by_text("They are equal up to turn 2, and differ from turn 3.").wait_for()  # only a token differs
    await page.get_by_text("Turn 3 of").wait_for()
    await page.get_by_role("button", name="First other token").click()
    facts = page.get_by_test_id("token-facts")
    for number, rollout in enumerate(group.rollouts[:2]):
        text = await facts.nth(number).inner_text()
        assert f"id {rollout.turns[2].model.sampled_tokens[1]}" in text

    await page.get_by_role("heading", name="Two rollouts").click()
    await page.keyboard.press("Home")
    await page.get_by_text("Turn 1 of").wait_for()
    await page.get_by_role("button", name="Between the two").click()
    await page.get_by_text("No pixel differs").wait_for()
    await page.keyboard.press("ArrowRight")
    await page.get_by_text("Turn 2 of").wait_for()
    await remove(window, [run])


async def test_the_difference_of_two_images_is_theirs(window: Window) -> None:
    page, run, hand = window.page, window.site.ended.run_id, Hand()
    rollouts = (await window.json(f"/api/rollouts?run_id={run}&phase=step&sort=-turns"))["items"]
    ids = [one["rollout_id"] for one in rollouts]
    place, changed = await _first_change(window, ids)  # taps at random may change nothing in all of a rollout's turns
    await window.open(f"/rollouts?run_id={run}&phase=step&sort=-turns")
    for nth in (place, 0):
        await hand.click(page.get_by_role("checkbox", checked=False).nth(nth))
    await hand.click(page.get_by_role("link", name="Side by side"))
    assert hand.num_clicks <= 3
    await page.wait_for_url(re.compile(r"/pair\?of="))
    assert [ids[place], ids[place == 0]] == re.findall(r"%2F([0-9a-f]+)", page.url)
    await page.goto(f"{page.url}&turn={changed['turn_index'] + 1}&screens=change")
    drawn = page.get_by_role("img", name=re.compile("Difference of")).first
    await drawn.scroll_into_view_if_needed()
    await page.wait_for_function("[...document.images].every((one) => one.complete)")
    seen = Image.open(BytesIO(await drawn.screenshot())).convert("RGB")

    before, after = [await _image(window, changed[place]["sha256"]) for place in ("before", "after")]
    expected = ImageChops.difference(before, after).resize(seen.size)
    away = ImageChops.difference(seen, expected).convert("L")
    inner = away.crop((8, 8, away.width - 8, away.height - 8))  # the corners are round
    off = sum(inner.histogram()[48:]) / (inner.width * inner.height)
    assert expected.getbbox() is not None
    assert off < 0.05  # of scaling: edges of letters


async def _first_change(window: Window, ids: list[str]) -> tuple[int, Any]:
    """The first turn that changed its screen, behind the place of its rollout."""
    for place, rollout_id in enumerate(ids):
        for turn in (await window.json(f"/api/runs/{window.site.ended.run_id}/rollouts/{rollout_id}"))["turns"]:
            if turn["after"] and turn["after"]["sha256"] != turn["before"]["sha256"]:
                return place, turn
    raise AssertionError("expected a turn that changed its screen, got none")


async def _image(window: Window, sha256: str) -> Any:
    answer = await window.page.request.get(f"{window.site.base_url}/api/screenshots/{sha256}")
    return Image.open(BytesIO(await answer.body())).convert("RGB")


@pytest.mark.parametrize("width_px", [390, 1280])
async def test_the_button_for_two_chosen_rollouts_stays_in_sight(window: Window, width_px: int) -> None:
    page, run = window.page, window.site.ended.run_id
    await page.set_viewport_size({"width": width_px, "height": 700})
    for path, boxes in (
        (f"/rollouts?run_id={run}&phase=step", page.locator("table.rollouts input[type=checkbox]")),
        (await _first_group(window), page.get_by_role("checkbox", name="Choose rollout")),
    ):
        await window.open(path)
        await boxes.nth(5).wait_for()
        for place in (0, 5):
            await boxes.nth(place).click()
        button = page.get_by_role("link", name="Side by side")
        for share in (0, 0.5):  # of the way down the page
            await page.evaluate("share => scrollTo(0, share * document.documentElement.scrollHeight)", share)
            await expect(button).to_be_in_viewport(ratio=1.0)
    await page.keyboard.press("s")
    await page.wait_for_url(re.compile(r"/pair\?of="))


async def _first_group(window: Window) -> str:
    run = window.site.ended.run_id
    detail = await window.json(f"/api/runs/{run}/step/1")
    return f"/runs/{run}/step/1/groups/{detail['groups'][0]['group_id']}"


async def test_without_two_rollouts_the_page_says_how_to_choose_them(window: Window) -> None:
    await window.open("/pair")
    await window.page.get_by_text("Choose two in a table of rollouts or in a group").wait_for()
