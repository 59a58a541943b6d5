"""Two ways to go through the web app: with the mouse, whose clicks are counted in the page, or with keys alone."""

import io
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image

COUNT_CLICKS = """addEventListener("pointerdown", (event) => {
  if (event.isTrusted) sessionStorage.setItem("clicks", 1 + Number(sessionStorage.getItem("clicks")));
}, true);"""

# what is wrong with the place of the focus, after a key has moved it; whether it is the one wanted
LOOK = """(wanted) => {
  const one = document.activeElement;
  const box = one.getBoundingClientRect();
  const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  const top = document.elementFromPoint(x, y);
  const around = [one, one.parentElement, one.parentElement?.parentElement].filter((part) => part?.id !== "content");
  const isLined = around.some((part) => part && getComputedStyle(part).outlineStyle !== "none");
  const isDrawn = (isLined && one.matches(":focus-visible")) || one.matches(".palette-input");
  const name = one.outerHTML.slice(0, 120);
  const wrong = [];
  if (one === document.body) wrong.push("the focus is lost");
  else if (!isDrawn) wrong.push(`the focus is not drawn: ${name}`);
  if (!top || !(one.contains(top) || top.contains(one))) wrong.push(`the focus is out of sight or covered: ${name}`);
  return [one === wanted, wrong];
}"""
IS_BEFORE = "one => !!(document.activeElement.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING)"
MOST_STOPS = 300
MARGIN_PX = 5
CONTRAST = 3.0  # of a focused to an unfocused pixel, WCAG 2.2, 2.4.13


class Hand(Protocol):
    async def press(self, locator: Any) -> None:
        """Follow a link, push a button."""
        ...

    async def tick(self, locator: Any) -> None:
        """Tick a box."""
        ...

    async def view(self, name: str) -> None:
        """Choose a tab of the page."""
        ...

    async def point(self, chart: str, *, x: float, y: float, arrows: str) -> None:
        """Open a point of a chart: at these shares of its width and height, or after these arrow keys."""
        ...

    async def take_stock(self, at_most: int) -> None:
        """All of it took so many clicks at most; the keyboard took none, and the focus was always in sight."""
        ...


@dataclass(kw_only=True)
class Mouse:
    page: Any

    async def press(self, locator: Any) -> None:
        await locator.click()

    async def tick(self, locator: Any) -> None:
        await locator.click()

    async def view(self, name: str) -> None:
        await self.page.get_by_role("tab", name=name).click()

    async def point(self, chart: str, *, x: float, y: float, arrows: str) -> None:
        plot = plot_of(self.page, chart).locator(".u-over")
        await plot.wait_for()
        box = await plot.bounding_box()
        inside = min(max(x * box["width"], 2), box["width"] - 2)
        await plot.click(position={"x": inside, "y": y * box["height"]})

    async def take_stock(self, at_most: int) -> None:
        assert 0 < await _clicks(self.page) <= at_most


@dataclass(kw_only=True)
class Keyboard:
    page: Any
    wrong: list[str] = field(default_factory=list[str])

    async def press(self, locator: Any) -> None:
        await self._reach(locator)
        await self.page.keyboard.press("Enter")

    async def tick(self, locator: Any) -> None:
        await self._reach(locator)
        await self.page.keyboard.press("Space")

    async def view(self, name: str) -> None:
        tabs = self.page.get_by_role("tab")
        await self._reach(self.page.get_by_role("tab", selected=True))
        chosen = self.page.get_by_role("tab", name=name)
        for _ in range(await tabs.count()):
            if await chosen.get_attribute("aria-selected") == "true":
                return
            await self.page.keyboard.press("ArrowRight")
        raise AssertionError(f"no arrow leads to the tab {name}")

    async def point(self, chart: str, *, x: float, y: float, arrows: str) -> None:
        plot = plot_of(self.page, chart)
        await plot.locator(".u-over").wait_for()
        await self._reach(plot)
        for arrow in arrows.split():
            await self.page.keyboard.press(arrow)
        await self.page.keyboard.press("Enter")

    async def take_stock(self, at_most: int) -> None:
        assert self.wrong == []
        assert await _clicks(self.page) == 0

    async def _reach(self, locator: Any) -> None:
        """Go there from stop to stop, and see that it looks otherwise with the focus than without."""
        await locator.wait_for()
        key = "Shift+Tab" if await locator.evaluate(IS_BEFORE) else "Tab"
        is_there = await locator.evaluate("one => one === document.activeElement")
        for _ in range(MOST_STOPS):
            if is_there:
                break
            await self.page.keyboard.press(key)
            is_there, wrong = await locator.evaluate(LOOK)
            self.wrong += wrong
        assert is_there, f"{MOST_STOPS} times {key} do not lead to {locator}"
        box = await locator.bounding_box()
        clip = {"x": max(0, box["x"] - MARGIN_PX), "y": max(0, box["y"] - MARGIN_PX)}
        clip |= {"width": box["width"] + 2 * MARGIN_PX, "height": box["height"] + 2 * MARGIN_PX}
        focused = await self.page.screenshot(clip=clip)
        await locator.evaluate("one => one.blur()")
        plain = await self.page.screenshot(clip=clip)
        await locator.evaluate("one => one.focus()")
        changed = int((contrast(focused, plain) >= CONTRAST).sum())
        if changed < 2 * (box["width"] + box["height"]):  # a line of one pixel around it
            self.wrong.append(f"the focus changes {changed} pixels of {box} in {locator}")


def contrast(first: bytes, second: bytes) -> Any:
    """The ratio of the luminances of two pictures, pixel by pixel, as WCAG 2.2 defines it: [height, width]."""
    lights: list[Any] = []
    for data in (first, second):
        with Image.open(io.BytesIO(data)) as image:
            value = np.asarray(image.convert("RGB"), dtype=float) / 255
        linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
        lights.append(linear @ (0.2126, 0.7152, 0.0722) + 0.05)
    return np.maximum(*lights) / np.minimum(*lights)


def plot_of(page: Any, chart: str) -> Any:
    return page.locator(f'.chart-plot[aria-label^="{chart}:"]')


async def _clicks(page: Any) -> int:
    return int(await page.evaluate("Number(sessionStorage.getItem('clicks'))"))
