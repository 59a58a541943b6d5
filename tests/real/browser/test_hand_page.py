"""The page on which a person takes over, in a real browser: what a mouse does on the screenshot becomes lines."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.run.by_hand import Person
from cua_rl.run.hand_page import serve_page
from cua_rl.types.conversation import EncodedImage, Tool
from tests.patience import patience
from tests.run.test_by_hand import person

playwright = pytest.importorskip("playwright.async_api", reason="pip install playwright, as scripts/setup.sh does")


def screenshot(colour: str) -> EncodedImage:
    data = BytesIO()
    Image.new("RGB", (192, 320), colour).save(data, "PNG")
    return EncodedImage(data=data.getvalue(), format="png", width_px=192, height_px=320)


@asynccontextmanager
async def looking_at(asked: Person) -> AsyncGenerator[Any]:
    """A browser's page once it shows the screenshot."""
    async with serve_page(asked, "Open the settings.") as link, playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=str(find_chromium()), args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport={"width": 600, "height": 700})
            page.set_default_timeout(1000 * patience(20))
            await page.goto(link)
            async with asyncio.timeout(patience(30)):  # the page lets no script wait for it
                while await page.evaluate("document.querySelector('#screen').naturalWidth") != 192:
                    await asyncio.sleep(0.05)
            yield page
        finally:
            await browser.close()


async def next_line(asked: Person) -> str | None:
    async with asyncio.timeout(patience(20)):
        return await asked.lines.get()


def is_near(line: str | None, meant: str) -> bool:
    """Whether a line has the same words, and numbers within a pixel: the page may place its image between two."""
    words, others = str(line).split(), meant.split()
    return len(words) == len(others) and all(
        abs(int(word) - int(other)) <= 1 if other.isdigit() else word == other
        for word, other in zip(words, others, strict=True)
    )


def shown(tmp_path: Path, tool: Tool) -> Person:
    asked = replace(person(tmp_path), tool=tool)
    asked.seen, asked.turn, asked.said = screenshot("white"), 3, ["turn 3"]
    return asked


@pytest.mark.parametrize("tool", [MOBILE_USE, COMPUTER_USE])
async def test_clicks_drags_and_typed_lines_arrive_as_words_for_the_device(tmp_path: Path, tool: Tool) -> None:
    asked = shown(tmp_path, tool)
    async with looking_at(asked) as page:
        screen = page.locator("#screen")
        await screen.click(position={"x": 96, "y": 160})
        assert is_near(await next_line(asked), "click 96 160")
        await screen.click(position={"x": 10, "y": 10})  # on a screen that was acted on already
        asked.seen, asked.turn = screenshot("black"), 4
        await page.locator("#turn", has_text="Turn 4").wait_for()
        box = await screen.bounding_box()
        await page.mouse.move(box["x"] + 20, box["y"] + 300)
        await page.mouse.down()
        await page.mouse.move(box["x"] + 30, box["y"] + 100)
        await page.mouse.up()
        drag = [await next_line(asked)]
        if tool is COMPUTER_USE:
            drag.append(await next_line(asked))
        await page.get_by_label("Line").fill('type "green tea"')
        await page.get_by_label("Line").press("Enter")
        assert await next_line(asked) == 'type "green tea"'
        assert await page.title() == "Open the settings."
    meant = ["swipe 20 300 30 100"] if tool is MOBILE_USE else ["mouse_move 20 300", "left_click_drag 30 100"]
    assert all(map(is_near, drag, meant)), drag
    assert asked.lines.empty()


async def test_a_page_without_the_token_says_so(tmp_path: Path) -> None:
    async with looking_at(shown(tmp_path, MOBILE_USE)) as page:
        await page.goto(page.url.partition("#")[0])
        await page.reload()
        await page.locator("#turn", has_text="No answer").wait_for()
        assert await page.evaluate("document.querySelector('#screen').naturalWidth") == 0
