"""The shade that is pulled down from the status bar: notifications first, quick settings below."""

from dataclasses import replace

from cua_rl.environments.phone.simulator import controls
from cua_rl.environments.phone.simulator.catalog import MAX_BRIGHTNESS, QUICK_TILES, WIDTH, Toggle, find_app, glyph_of
from cua_rl.environments.phone.simulator.elements import Element, Launch, Operate, Rect, Screen, Slide
from cua_rl.environments.phone.simulator.state import PhoneState

_VIEWPORT = Rect(x=0, y=controls.STATUS_HEIGHT, width=WIDTH, height=controls.NAV_TOP - controls.STATUS_HEIGHT)
_NUM_SMALL_TILES = 4
_CARD_HEIGHT = 42
_MIN_PULL = 60
"""Logical units that a finger must move to pull the shade down or push it up."""


def build_shade(state: PhoneState) -> Screen:
    """The open half of the shade, with the navigation bar below it."""
    if state.shade == "quick_settings":
        heading, level = "Quick settings", state.brightness_level / MAX_BRIGHTNESS
        width, height, gap = 85, 44, 6
        content = (
            *(
                _tile(state, toggle, (8 + i % 2 * (width + gap), 48 + i // 2 * (height + gap), width, height))
                for i, toggle in enumerate(QUICK_TILES)
            ),
            controls.slider("Brightness", level, Slide(level="brightness"), "display", y=202),
            controls.pill("All settings", (54, 250, 84, 24), Launch(app="settings")),
        )
    else:
        heading, content = "Notifications", _notifications(state)
    bar = controls.title(heading, y=controls.STATUS_HEIGHT, height=controls.CONTENT_TOP - controls.STATUS_HEIGHT)
    return Screen(name=state.screen, content=content, fixed=(bar, *controls.navigation_bar()), viewport=_VIEWPORT)


def _notifications(state: PhoneState) -> tuple[Element, ...]:
    width = (WIDTH - 16) // _NUM_SMALL_TILES
    tiles = [
        _tile(state, toggle, (8 + i * width + 3, controls.CONTENT_TOP + 2, width - 6, 32))
        for i, toggle in enumerate(list(QUICK_TILES)[:_NUM_SMALL_TILES])
    ]
    top = controls.CONTENT_TOP + 42
    shown = state.system.shown_notifications()
    if not shown:
        return (
            *tiles,
            controls.place("empty", "Empty", "text", (14, top + 20, WIDTH - 28, 14), text="No notifications"),
        )
    cards = [
        controls.place(
            f"notification:{i}",
            notification.title,
            "notification",
            (8, top + i * (_CARD_HEIGHT + 4), WIDTH - 16, _CARD_HEIGHT),
            effect=Launch(app=notification.app),
            text=notification.title,
            detail=notification.text,
            glyph=glyph_of(notification.app),
            paper=find_app(notification.app).paper,
            ink=find_app(notification.app).ink,
        )
        for i, notification in enumerate(shown)
    ]
    clear = controls.pill("Clear all", (112, controls.NAV_TOP - 28, 72, 22), Operate(command="clear_notifications"))
    return (*tiles, *cards, clear)


def _tile(state: PhoneState, toggle: Toggle, box: controls.Box) -> Element:
    label, name, is_on = QUICK_TILES[toggle], f"tile:{toggle.value}", state.is_on(toggle)
    effect = Operate(command="toggle_tile", target=toggle.value)
    return controls.place(name, label, "tile", box, effect=effect, text=label, glyph=toggle.value, is_on=is_on)


def drag_shade(state: PhoneState, element: Element | None, y: float, dx: float, dy: float) -> PhoneState | None:
    """The state after a drag that the shade takes; None for a drag that is for the screen beneath.

    Down from the status bar opens the notifications, down again the quick settings; up closes the shade, and a
    notification that is pushed aside goes away.
    """
    is_downwards, is_sideways = dy >= _MIN_PULL, abs(dx) > abs(dy)
    if state.shade is None:
        if y < controls.STATUS_HEIGHT and is_downwards and not is_sideways:
            return replace(state, shade="notifications", focus=None)
        return None
    if is_sideways:
        if element is None or element.kind != "notification":
            return state
        gone = state.system.shown_notifications()[int(element.element_id.partition(":")[2])]
        left = tuple(notification for notification in state.system.notifications if notification != gone)
        return replace(state, system=replace(state.system, notifications=left))
    if is_downwards:
        return replace(state, shade="quick_settings")
    return replace(state, shade=None) if dy <= -_MIN_PULL else state
