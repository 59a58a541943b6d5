"""Mouse and keyboard of a page: one action, in pixels of the screenshot, as Playwright's input."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from cua_rl.environments.browser.settings import PageSettings
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.key_names import key_chord
from cua_rl.types import actions

_DRAG_STEPS = 8

if TYPE_CHECKING:
    from playwright.async_api import Page


def require_possible(action: actions.Action) -> None:
    """Raise `ActionRejected` for what no browser can do."""
    match action:
        case actions.PressKey(keys=keys):
            key_chord(keys)
        case actions.PressButton(button=button) if button is not actions.Button.BACK:
            raise ActionRejected(f"A browser has no button {button.value!r}.")
        case actions.OpenApp():
            raise ActionRejected("A browser opens no apps.")
        case _:
            pass


async def perform(page: "Page", action: actions.Action, settings: PageSettings) -> None:
    from playwright.async_api import TimeoutError as LateError

    match action:
        case actions.Click() | actions.DoubleClick() | actions.RightClick() | actions.LongPress() | actions.MoveMouse():
            await _point(page, action, settings)
        case actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y):
            await page.mouse.move(*_css(x, y, settings))
            await page.mouse.down()
            await page.mouse.move(*_css(to_x, to_y, settings), steps=_DRAG_STEPS)  # pages follow the mouse on its way
            await page.mouse.up()
        case actions.Scroll(x=x, y=y, right_px=right_px, down_px=down_px):
            await page.mouse.move(*_css(x, y, settings))
            await page.mouse.wheel(right_px / settings.scale, down_px / settings.scale)
        case actions.TypeText(text=text):
            await page.keyboard.type(text)
        case actions.PressKey(keys=keys):
            await page.keyboard.press(key_chord(keys))
        case actions.Wait(duration_s=duration_s):
            await asyncio.sleep(duration_s)
        case actions.PressButton():
            # the page before may never arrive; a person then still sees this one
            with suppress(LateError):
                await page.go_back(wait_until="commit", timeout=settings.settle_timeout_s * 1000)
        case actions.OpenApp():
            require_possible(action)


def mouse_after(action: actions.Action) -> tuple[int, int] | None:
    """The pixel at which an action leaves the mouse; None if it does not move it."""
    match action:
        case actions.Drag(to_x=x, to_y=y) | actions.Scroll(x=x, y=y) | actions.MoveMouse(x=x, y=y):
            return x, y
        case actions.Click() | actions.DoubleClick() | actions.RightClick() | actions.LongPress():
            return action.x, action.y
        case _:
            return None


async def _point(
    page: "Page",
    action: actions.Click | actions.DoubleClick | actions.RightClick | actions.LongPress | actions.MoveMouse,
    settings: PageSettings,
) -> None:
    x, y = _css(action.x, action.y, settings)
    match action:
        case actions.Click():
            await page.mouse.click(x, y)
        case actions.DoubleClick():
            await page.mouse.dblclick(x, y)
        case actions.RightClick():
            await page.mouse.click(x, y, button="right")
        case actions.LongPress(duration_s=duration_s):
            await page.mouse.click(x, y, delay=duration_s * 1000)
        case actions.MoveMouse():
            await page.mouse.move(x, y)


def _css(x: int, y: int, settings: PageSettings) -> tuple[float, float]:
    """The middle of a pixel of the screenshot, in CSS pixels of the viewport."""
    return (x + 0.5) / settings.scale, (y + 0.5) / settings.scale
