"""The shade that is pulled down from the status bar: notifications first, quick settings below."""

from cua_rl.devices.simulator.catalog import MAX_BRIGHTNESS, SETTINGS, WIDTH, Toggle
from cua_rl.devices.simulator.elements import Element, Launch, Operate, Rect, Screen, Slide, SwitchTile
from cua_rl.devices.simulator.layout import CONTENT_TOP, NAV_TOP, STATUS_HEIGHT, title
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import QUICK_TILES, find_app, glyph_of
from cua_rl.devices.simulator.system_controls import pill

_VIEWPORT = Rect(x=0, y=STATUS_HEIGHT, width=WIDTH, height=NAV_TOP - STATUS_HEIGHT)
_NUM_SMALL_TILES = 4
_CARD_HEIGHT = 42


def build_shade(state: PhoneState, navigation: tuple[Element, ...]) -> Screen:
    """The half of the shade that shows, with the navigation bar below it."""
    is_quick = state.shade == "quick_settings"
    heading = "Quick settings" if is_quick else "Notifications"
    bar = title(heading, y=STATUS_HEIGHT, height=CONTENT_TOP - STATUS_HEIGHT)
    content = _quick_settings(state) if is_quick else _notifications(state)
    return Screen(name=state.screen, content=content, fixed=(bar, *navigation), viewport=_VIEWPORT)


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
    slider = Element(
        element_id="slider:brightness",
        label="Brightness",
        kind="slider",
        rect=Rect(x=0, y=202, width=WIDTH, height=36),
        effect=Slide(level="brightness"),
        level=state.brightness_level / MAX_BRIGHTNESS,
        glyph="display",
        paper=SETTINGS["display"].paper,
        ink="#ffffff",
    )
    return (*tiles, slider, pill("All settings", (54, 250, 84, 24), Launch(app="settings")))


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
