"""The shade that is pulled down from the status bar: notifications first, quick settings below."""

from dataclasses import replace

from cua_rl.devices.simulator.catalog import MAX_BRIGHTNESS, QUICK_TILES, WIDTH, Toggle, find_app, glyph_of
from cua_rl.devices.simulator.controls import CONTENT_TOP, NAV_TOP, STATUS_HEIGHT, navigation_bar, pill, slider, title
from cua_rl.devices.simulator.elements import Element, Launch, Operate, Rect, Screen, Slide, SwitchTile
from cua_rl.devices.simulator.state import PhoneState

_VIEWPORT = Rect(x=0, y=STATUS_HEIGHT, width=WIDTH, height=NAV_TOP - STATUS_HEIGHT)
_NUM_SMALL_TILES = 4
_CARD_HEIGHT = 42
_MIN_PULL = 60
"""Logical units that a finger must move to pull the shade down or push it up."""


def build_shade(state: PhoneState) -> Screen:
    """The half of the shade that shows, with the navigation bar below it."""
    is_quick = state.shade == "quick_settings"
    heading = "Quick settings" if is_quick else "Notifications"
    bar = title(heading, y=STATUS_HEIGHT, height=CONTENT_TOP - STATUS_HEIGHT)
    content = _quick_settings(state) if is_quick else _notifications(state)
    return Screen(name=state.screen, content=content, fixed=(bar, *navigation_bar()), viewport=_VIEWPORT)


def _notifications(state: PhoneState) -> tuple[Element, ...]:
    width = (WIDTH - 16) // _NUM_SMALL_TILES
    tiles = [
        _tile(state, toggle, Rect(x=8 + i * width + 3, y=CONTENT_TOP + 2, width=width - 6, height=32))
        for i, toggle in enumerate(list(QUICK_TILES)[:_NUM_SMALL_TILES])
    ]
    top = CONTENT_TOP + 42
    shown = state.system.shown_notifications()
    if not shown:
        rect = Rect(x=14, y=top + 20, width=WIDTH - 28, height=14)
        empty = Element(element_id="empty", label="Empty", kind="text", rect=rect, text="No notifications")
        return (*tiles, empty)
    cards = [
        Element(
            element_id=f"notification:{i}",
            label=notification.title,
            kind="notification",
            rect=Rect(x=8, y=top + i * (_CARD_HEIGHT + 4), width=WIDTH - 16, height=_CARD_HEIGHT),
            effect=Launch(app=notification.app),
            text=notification.title,
            detail=notification.text,
            glyph=glyph_of(notification.app),
            paper=find_app(notification.app).paper,
            ink=find_app(notification.app).ink,
        )
        for i, notification in enumerate(shown)
    ]
    clear = pill("Clear all", (112, NAV_TOP - 28, 72, 22), Operate(command="clear_notifications"))
    return (*tiles, *cards, clear)


def _quick_settings(state: PhoneState) -> tuple[Element, ...]:
    width, height, gap = 85, 44, 6
    tiles = [
        _tile(
            state, toggle, Rect(x=8 + i % 2 * (width + gap), y=48 + i // 2 * (height + gap), width=width, height=height)
        )
        for i, toggle in enumerate(QUICK_TILES)
    ]
    brightness = slider(
        "Brightness", state.brightness_level / MAX_BRIGHTNESS, Slide(level="brightness"), "display", y=202
    )
    return (*tiles, brightness, pill("All settings", (54, 250, 84, 24), Launch(app="settings")))


def _tile(state: PhoneState, toggle: Toggle, rect: Rect) -> Element:
    return Element(
        element_id=f"tile:{toggle.value}",
        label=QUICK_TILES[toggle],
        kind="tile",
        rect=rect,
        effect=SwitchTile(toggle=toggle),
        text=QUICK_TILES[toggle],
        glyph=toggle.value,
        is_on=state.is_on(toggle),
    )


def drag_shade(state: PhoneState, element: Element | None, y: float, dx: float, dy: float) -> PhoneState | None:
    """The state after a drag that the shade takes; None for a drag that is for the screen beneath.

    Down from the status bar opens the notifications, down again the quick settings; up closes the shade, and a
    notification that is pushed aside goes away.
    """
    is_downwards, is_sideways = dy >= _MIN_PULL, abs(dx) > abs(dy)
    if state.shade is None:
        if y < STATUS_HEIGHT and is_downwards and not is_sideways:
            return replace(state, shade="notifications", focus=None)
        return None
    if is_sideways:
        return _dismiss(state, element.element_id) if element and element.kind == "notification" else state
    if is_downwards:
        return replace(state, shade="quick_settings")
    return replace(state, shade=None) if dy <= -_MIN_PULL else state


def _dismiss(state: PhoneState, element_id: str) -> PhoneState:
    shown = state.system.shown_notifications()
    gone = shown[int(element_id.partition(":")[2])]
    left = tuple(notification for notification in state.system.notifications if notification != gone)
    return replace(state, system=replace(state.system, notifications=left))


def record_tile(state: PhoneState, toggle: str) -> PhoneState:
    """Remember that a toggle was flipped in the shade."""
    used = tuple(sorted({*state.system.tiles_used, toggle}))
    return replace(state, system=replace(state.system, tiles_used=used))
