import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import pytest
import pytest_asyncio

pytest.importorskip("miniwob", reason="`make setup` installs the pages")

from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.expert import MiniWobExperts
from cua_rl.environments.browser.miniwob.pages import read_result
from cua_rl.environments.browser.miniwob.routes import ROUTES
from cua_rl.environments.browser.miniwob.templates import (
    MINIWOB_BROWSER,
    MiniWobTemplate,
    all_templates,
    miniwob_template,
)
from cua_rl.environments.browser.page import as_page
from cua_rl.environments.device import ActionRejected, Device
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.supervised.datasets import ExpertExamples
from cua_rl.supervised.demonstrations import build_supervised_datum, demonstrate
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import instruct, prepare
from cua_rl.types.actions import Click, Drag, PressKey, Scroll, TypeText
from scripts.tiny_models.page_lessons import draw_page_lesson
from scripts.tiny_models.page_screens import look_at, read_screens, write_screens

RENDERER = make_renderer(TINY_QWEN3_VL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[MiniWobPages]:
    async with MiniWobPages(scale=1.2) as pages:
        yield pages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def used_pages() -> AsyncIterator[MiniWobPages]:
    """Pages that are used up by many tasks, one after the other."""
    async with MiniWobPages(scale=1.2, max_idle=1) as pages:
        yield pages


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", list(ROUTES))
async def test_experts_solve_their_tasks_by_pixel(backend: MiniWobPages, name: str) -> None:
    for seed in (0, 1_000_000):
        task = miniwob_template(name).make_task(seed)
        page = await backend.make(task.device_request())
        await prepare(task, page)
        assert not (await task.validate(page, None)).success
        expert = MiniWobExperts().make(task, page, error_rate=0.0, random=random.Random(0))
        await demonstrate(await instruct(task, page), page, expert, max_turns=task.max_turns)
        assert (await task.validate(page, None)).success
        await page.close()


async def test_pages_wait_for_the_next_rollout_of_their_task_until_there_are_too_many() -> None:
    names = ("click-button", "click-tab", "click-link")
    button, tab, link = (miniwob_template(name).make_task(0) for name in names)
    async with MiniWobPages(scale=1.2, max_idle=2) as pages:
        on_button = await pages.make(button.device_request())
        await on_button.close()
        on_tab = await pages.make(tab.device_request())
        await on_tab.close()
        assert on_tab is not on_button
        assert await pages.make(tab.device_request()) is on_tab
        assert await pages.make(link.device_request()) is on_button  # both are kept already


async def test_a_seed_gives_the_same_page_again_whatever_happened_on_it(backend: MiniWobPages) -> None:
    task, other = (miniwob_template("click-button").make_task(seed) for seed in (1, 2))
    page = await backend.make(task.device_request())
    await prepare(task, page)
    first, told = await page.observe(), await instruct(task, page)
    assert (first.width_px, first.height_px) == (192, 252)
    await prepare(other, page)
    assert (await page.observe()).sha256 != first.sha256
    await page.execute(Click(x=30, y=80))
    await prepare(task, page)
    assert ((await page.observe()).sha256, await instruct(task, page)) == (first.sha256, told)
    await page.close()


async def test_the_first_click_on_a_page_meets_what_looks_different_under_the_mouse() -> None:
    task = miniwob_template("social-media").make_task(1)
    async with MiniWobPages(scale=1.0) as fresh:  # its images have never been shown
        page = as_page(await fresh.make(task.device_request()))
        await prepare(task, page)
        place = "(({ x, y, width, height }) => [x + width / 2, y + height / 2])"
        x, y = cast("list[float]", await page.evaluate(f"() => {place}($('.more')[0].getBoundingClientRect())"))
        await page.execute(Click(x=round(x), y=round(y)))

        assert await page.evaluate("() => $('#area ul:not(.hide)').length") == 1
        await page.close()


MOVING = [template for template in all_templates() if "real_time" in template.tags]
STILL = [template for template in all_templates() if template not in MOVING]


@pytest.mark.parametrize("template", STILL, ids=lambda template: template.name)
async def test_every_screen_is_the_seed_s_whatever_happened_before(
    used_pages: MiniWobPages, template: MiniWobTemplate
) -> None:
    """At first, after another instance was used, after another task: all pages but those that move by themselves."""
    rng, other_page = random.Random(0), miniwob_template("click-tab-2-hard")
    page = await used_pages.make(template.make_task(0).device_request())
    first: dict[int, list[bytes]] = {}
    for seed in (0, 1):
        await prepare(template.make_task(seed), page)
        first[seed] = await look_and_go_on(page)

    for seed, between in ((0, template), (1, other_page)):
        await prepare(between.make_task(seed + 2), page)
        await use(page, rng)
        await prepare(template.make_task(seed), page)
        assert await look_and_go_on(page) == first[seed], (seed, between.name)
    await page.close()


async def look_and_go_on(page: Device) -> list[bytes]:
    """The screen, and the screen after a key that moves the focus."""
    seen = await page.observe()
    await page.execute(PressKey(keys=("tab",)))
    return [seen.data, (await page.observe()).data]


async def use(page: Device, rng: random.Random) -> None:
    """What agents do, at places that mean nothing."""

    def place() -> tuple[int, int]:
        return rng.randrange(192), rng.randrange(60, 252)

    (x, y), (to_x, to_y) = place(), place()
    for action in (
        Click(x=x, y=y), Scroll(x=to_x, y=to_y, down_px=120), TypeText(text="ab"),
        Drag(x=x, y=y, to_x=to_x, to_y=to_y), Click(x=to_x, y=to_y),
    ):  # fmt: skip
        with suppress(ActionRejected):
            await page.execute(action)


async def test_a_wrong_click_ends_the_task_and_no_click_begins_it_again(backend: MiniWobPages) -> None:
    task = miniwob_template("click-dialog-2").make_task(3)
    page = await backend.make(task.device_request())
    await prepare(task, page)
    screen = await look_at(page, "click-dialog-2")
    wrong = next(box for index, box in enumerate(screen.boxes) if index != screen.target)
    await page.execute(Click(x=round(wrong.x + wrong.width / 2), y=round(wrong.y + wrong.height / 2)))
    assert (await read_result(page)).is_over
    await page.execute(Click(x=96, y=126))  # the middle of what covers the page
    result, validation = await read_result(page), await task.validate(page, "I did it.")
    assert (result.is_over, result.reward) == (True, -1.0)
    assert not validation.success
    await page.close()


async def test_pages_are_used_again_and_shared_by_tasks(backend: MiniWobPages) -> None:
    task = miniwob_template("click-color").make_task(0)
    page = await backend.make(task.device_request())
    await page.close()
    again = await backend.make(task.device_request())
    assert again is page
    await again.close()
    assert backend.num_browsers_started == 1


async def test_kept_screens_give_the_conversation_that_the_agent_has(backend: MiniWobPages, tmp_path) -> None:
    task = miniwob_template("click-color").make_task(7)
    page = await backend.make(task.device_request())
    await prepare(task, page)
    write_screens(tmp_path / "screens.jsonl", [await look_at(page, "click-color")])
    (screen,) = read_screens(tmp_path / "screens.jsonl")
    kept = draw_page_lesson(screen, random.Random(0), listing_share=0.0)
    expert = MiniWobExperts().make(task, page, error_rate=0.0, random=random.Random(0))
    lived = await demonstrate(await instruct(task, page), page, expert, max_turns=1)
    first, second = (build_supervised_datum(RENDERER, lesson, name="lesson") for lesson in (kept, lived))
    assert first.model_input == second.model_input
    assert first.loss_mask == second.loss_mask
    await page.close()


async def test_a_supervised_run_learns_from_experts_on_pages(backend: MiniWobPages) -> None:
    source = {"source_type": "miniwob", "task_names": ["click-option", "enter-text"]}
    dataset = ExpertExamples(
        tasks=load_tasks(source, seed=0, split="train", device=MINIWOB_BROWSER),
        held_out_tasks=(),
        devices=backend,
        experts=MiniWobExperts(),
        renderer=RENDERER,
        error_rate=0.0,
        max_turns=10,
        seed=0,
    )
    first, again = await dataset.batch(0, 2), await dataset.batch(0, 2)
    assert [datum.rollout_id for datum in first] == [datum.rollout_id for datum in again]
    assert all(sum(datum.loss_mask) > 50 for datum in first)
