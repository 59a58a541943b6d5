"""A failure is with a colleague after two clicks or a few keys: as a page, as a film, or as a link to the same view."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.test_pages import AXE
from tests.real.monitor_web.test_sets import Hand

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _saved(window: Window, action: Awaitable[None], folder: Path) -> Path:
    """The file that the browser saves because of what is done."""
    async with window.page.expect_download() as started:
        await action
    download = await started.value
    assert await download.failure() is None
    path = folder / download.suggested_filename
    await download.save_as(path)
    return path


async def violations_of(page: Any) -> list[str]:
    """What axe finds wrong with the page, however slight."""
    await page.evaluate(AXE.read_text())
    result = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{one['id']} at {one['nodes'][0]['html'][:120]}" for one in result["violations"]]


async def test_a_failure_is_saved_as_a_page_or_a_film_two_clicks_from_the_failures(
    window: Window, tmp_path: Path
) -> None:
    page, run = window.page, window.site.ended.run_id
    for label, kind in (("HTML", "html"), ("GIF", "gif"), ("WebP", "webp")):
        hand = Hand()
        await window.open(f"/rollouts?run_id={run}&verdict=failure&phase=step")
        await hand.click(page.locator("table.rollouts a[data-row]").first)
        button = page.get_by_role("link", name=label, exact=True)
        path = await _saved(window, hand.click(button), tmp_path)
        assert hand.num_clicks <= 2
        assert path.suffix == f".{kind}"
        rollout_id = page.url.rsplit("/", 1)[1]
        if kind == "html":
            assert rollout_id in path.read_text(encoding="utf-8")
        else:
            turns = (await window.json(f"/api/runs/{run}/rollouts/{rollout_id}"))["turns"]
            with Image.open(path) as film:
                assert film.format == kind.upper()
                assert 1 <= film.n_frames <= len(turns) + 1  # pyright: ignore[reportAttributeAccessIssue]


async def test_the_keyboard_alone_saves_a_failure(window: Window, tmp_path: Path) -> None:
    page, run = window.page, window.site.ended.run_id
    await window.open_failure_by_keys(run)
    await page.get_by_role("heading", name="Model output").wait_for()
    for key, kind in (("e", ".html"), ("g", ".gif"), ("w", ".webp")):
        assert (await _saved(window, page.keyboard.press(key), tmp_path)).suffix == kind


async def test_a_copied_link_opens_the_same_set(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await window.open(f"/rollouts?run_id={run}&phase=step&step=2&sort=turns")
    rows = page.locator("table.rollouts a[data-row]")
    await rows.first.wait_for()
    shown = await rows.evaluate_all("all => all.map(one => one.getAttribute('href'))")
    await page.get_by_role("button", name="Copy link").click()
    await page.get_by_text("Link copied").wait_for(state="attached")
    copied = await page.evaluate("navigator.clipboard.readText()")
    other = await page.context.new_page()
    await other.goto(copied)
    same = other.locator("table.rollouts a[data-row]")
    await same.first.wait_for()
    assert await same.evaluate_all("all => all.map(one => one.getAttribute('href'))") == shown
    await other.close()


async def test_without_a_clipboard_the_address_is_shown_selected_and_escape_closes_it(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await page.emulate_media(reduced_motion="reduce")
    await page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    await window.open(f"/rollouts?run_id={run}&phase=step&step=2")
    await page.locator("table.rollouts a[data-row]").first.wait_for()
    await page.keyboard.press("c")
    address = page.get_by_label("Address")
    assert await address.input_value() == page.url
    assert await page.evaluate("getSelection().toString()") == page.url
    assert await violations_of(page) == []
    await page.keyboard.press("Escape")
    await address.wait_for(state="detached")


async def test_the_page_of_a_rollout_with_its_buttons_has_no_violation_on_any_width(window: Window) -> None:
    page, run = window.page, window.site.ended.run_id
    await page.emulate_media(reduced_motion="reduce")
    (first, *_) = (await window.json(f"/api/rollouts?run_id={run}&verdict=failure&limit=1"))["items"]
    for width in (1280, 390):
        await page.set_viewport_size({"width": width, "height": 900})
        await window.open(f"/runs/{run}/rollouts/{first['rollout_id']}")
        await page.get_by_role("heading", name="What the model saw").wait_for()
        assert await violations_of(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
