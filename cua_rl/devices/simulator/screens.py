"""From state to screen: home, recent apps and Settings, and the frame that every app shares."""

from dataclasses import replace

from cua_rl.actions import Button
from cua_rl.devices.simulator import app_screens
from cua_rl.devices.simulator.catalog import (
    APPS,
    HEIGHT,
    MAX_BRIGHTNESS,
    MAX_VOLUME,
    SCREEN_TIMEOUTS_MS,
    SETTINGS,
    WIDTH,
    SettingSpec,
    Toggle,
)
from cua_rl.devices.simulator.controls import place
from cua_rl.devices.simulator.elements import Choose, Do, Element, Launch, Press, Push, Rect, Screen, Slide, Switch
from cua_rl.devices.simulator.home_folders import folder_name
from cua_rl.devices.simulator.keyboard import KEYBOARD_HEIGHT, keyboard_elements
from cua_rl.devices.simulator.launcher_screens import build_launcher, covers_home
from cua_rl.devices.simulator.layout import (
    CONTENT_BOTTOM,
    CONTENT_TOP,
    NAV_TOP,
    STATUS_HEIGHT,
    Column,
    back_arrow,
    row,
    title,
)
from cua_rl.devices.simulator.shade import build_shade
from cua_rl.devices.simulator.start import ICON_SIZE
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import EXTRA_ROWS, find_app, glyph_of
from cua_rl.devices.simulator.system_dialogs import is_dialog, with_dialog
from cua_rl.devices.simulator.system_screens import extra_row, system_page, time_zone_row, vibration_rows

_HOME_VIEWPORT = Rect(x=0, y=STATUS_HEIGHT, width=WIDTH, height=NAV_TOP - STATUS_HEIGHT)


def build_screen(state: PhoneState) -> Screen:
    """What the phone shows, scrolled as the state says."""
    if not state.is_screen_on:
        return Screen(name="off", content=(), viewport=Rect(x=0, y=0, width=WIDTH, height=HEIGHT))
    if state.shade is not None:
        return build_shade(state, _navigation_bar())
    if state.is_recents_open:
        return _recents(state)
    if state.app is None:
        return _home(state) if not state.subscreens else _launcher(state)
    return _app_screen(state, state.app)


def _home(state: PhoneState) -> Screen:
    search = place("search", "Search", "text", (16, 20, WIDTH - 32, 20), effect=Push(subscreen="drawer"))
    fixed = (search, *_navigation_bar())
    return Screen(name="home", content=_home_icons(state), fixed=fixed, viewport=_HOME_VIEWPORT)


def _home_icons(state: PhoneState) -> tuple[Element, ...]:
    return tuple(_home_icon(icon.app, icon.x, icon.y) for icon in state.home_pages[state.home_page])


def _launcher(state: PhoneState) -> Screen:
    column, viewport = build_launcher(state)
    keyboard = () if state.focus is None else keyboard_elements(state.keyboard)
    bottom = viewport.bottom if state.focus is None else NAV_TOP - KEYBOARD_HEIGHT
    max_scroll = max(0, column.y - bottom)
    scroll = min(state.scroll, max_scroll)
    behind = tuple(replace(icon, effect=None) for icon in _home_icons(state)) if covers_home(state) else ()
    return Screen(
        name=state.screen,
        content=(*behind, *(element.scrolled(scroll) for element in column.elements)),
        fixed=(*column.pinned, *keyboard, *_navigation_bar()),
        viewport=replace(viewport, height=bottom - viewport.y),
        max_scroll=max_scroll,
    )


def _home_icon(app: str, x: int, y: int) -> Element:
    folder, margin = folder_name(app), 6
    if folder is not None:
        box = (x - margin, y - margin, ICON_SIZE + 2 * margin, ICON_SIZE + 2 * margin + 5)
        effect = Push(subscreen=app)
        return place(
            app, folder, "app_icon", box, effect=effect, text=folder, glyph="apps", paper="#9aa3b5", ink="#ffffff"
        )
    spec = find_app(app)
    return Element(
        element_id=f"app:{app}",
        label=spec.label,
        kind="app_icon",
        rect=Rect(x=x - margin, y=y - margin, width=ICON_SIZE + 2 * margin, height=ICON_SIZE + 2 * margin + 5),
        effect=Launch(app=app),
        text=spec.label,
        glyph=glyph_of(app),
        paper=spec.paper,
        ink=spec.ink,
    )


def _recents(state: PhoneState) -> Screen:
    column = Column(top=STATUS_HEIGHT + 6)
    column.add(title("Recent apps", y=column.y, height=26))
    for app in state.recent_apps[:5]:
        spec = find_app(app)
        column.add(
            row(
                f"recent:{app}",
                y=column.y,
                label=spec.label,
                text=spec.label,
                glyph=glyph_of(app),
                paper=spec.paper,
                ink=spec.ink,
                effect=Launch(app=app),
                height=42,
            )
        )
    if state.recent_apps:
        rect = Rect(x=12, y=column.y + 6, width=76, height=22)
        column.add(
            Element(
                element_id="clear",
                label="Clear",
                kind="button",
                rect=rect,
                text="Clear all",
                effect=Do(command="clear_recents"),
            ),
            place(
                "screenshot",
                "Screenshot",
                "button",
                (104, rect.y, 76, 22),
                effect=Do(command="take_screenshot"),
                text="Screenshot",
            ),
        )
    else:
        column.add_text("Nothing has been opened yet", indent=14)
    return Screen(name="recents", content=column.elements, fixed=_navigation_bar(), viewport=_HOME_VIEWPORT)


def _app_screen(state: PhoneState, app: str) -> Screen:
    match state.screen.split("/"):
        case ["settings"]:
            heading, column = "Settings", _settings(state)
        case ["settings", "display"]:
            heading, column = "Display", _display(state)
        case ["settings", "sound"]:
            heading, column = "Sound", _sound(state)
        case ["settings", "date"]:
            heading, column = "Date and time", _date(state)
        case ["settings", "about"]:
            heading, column = "About phone", _about(state)
        case ["settings", _]:
            heading, column = system_page(state)
        case _:
            heading, column = app_screens.build_app(state, app)
    screen = _framed(state, heading, column)
    is_asking = bool(state.subscreens) and is_dialog(state.subscreens[-1])
    return with_dialog(screen, state.subscreens[-1]) if is_asking else screen


def _framed(state: PhoneState, heading: str, column: Column) -> Screen:
    bottom = CONTENT_BOTTOM if state.focus is None else NAV_TOP - KEYBOARD_HEIGHT
    max_scroll = max(0, column.y - bottom)
    scroll = min(state.scroll, max_scroll)
    back = () if not state.subscreens else (back_arrow(),)
    keyboard = () if state.focus is None else keyboard_elements(state.keyboard)
    bar = title(heading, y=STATUS_HEIGHT, height=CONTENT_TOP - STATUS_HEIGHT, indent=30 if back else 12)
    return Screen(
        name=state.screen,
        content=tuple(element.scrolled(scroll) for element in column.elements),
        fixed=(bar, *back, *column.pinned, *keyboard, *_navigation_bar()),
        viewport=Rect(x=0, y=CONTENT_TOP, width=WIDTH, height=bottom - CONTENT_TOP),
        max_scroll=max_scroll,
    )


def _settings(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    for name in state.setting_rows:
        is_extra = name in EXTRA_ROWS
        y = column.y
        column.add(extra_row(state, name, y) if is_extra else _setting_row(state, SETTINGS[name], y))
    return column


def _setting_row(state: PhoneState, spec: SettingSpec, y: int) -> Element:
    if spec.toggle is None:
        return row(
            f"page:{spec.row}",
            y=y,
            label=spec.label,
            text=spec.title,
            glyph=spec.row,
            paper=spec.paper,
            effect=Push(subscreen=spec.row),
        )
    return row(
        f"toggle:{spec.row}",
        y=y,
        label=spec.label,
        text=spec.title,
        glyph=spec.row,
        paper=spec.paper,
        effect=Switch(toggle=spec.toggle),
        kind="switch_row",
        is_on=state.is_on(spec.toggle),
    )


def _display(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    column.add_heading("Brightness")
    column.add(
        _slider("Brightness", column.y, state.brightness_level / MAX_BRIGHTNESS, Slide(level="brightness"), "display")
    )
    column.add_heading("Screen timeout")
    for timeout_ms, text in SCREEN_TIMEOUTS_MS.items():
        column.add(
            row(
                f"timeout:{timeout_ms}",
                y=column.y,
                label=text,
                text=text,
                effect=Choose(screen_timeout_ms=timeout_ms),
                kind="choice_row",
                is_on=timeout_ms == state.screen_timeout_ms,
                height=26,
            )
        )
    return column


def _sound(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    column.add_heading("Media volume")
    column.add(_slider("Volume", column.y, state.media_volume / MAX_VOLUME, Slide(level="media_volume"), "sound"))
    column.add(_setting_row(state, SETTINGS[Toggle.DO_NOT_DISTURB.value], column.y))
    column.add(*vibration_rows(state, column.y))
    return column


def _date(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    column.add(
        row(
            "toggle:auto_time",
            y=column.y,
            label="Automatic",
            text="Automatic time",
            glyph="date",
            paper=SETTINGS["date"].paper,
            effect=Switch(toggle=Toggle.AUTO_TIME),
            kind="switch_row",
            is_on=state.is_on(Toggle.AUTO_TIME),
        )
    )
    column.add_text(f"The time is {state.clock}.", indent=14)
    column.add(time_zone_row(state, column.y))
    return column


def _about(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    for name, value in (
        ("Model", "Simulated phone"),
        ("Serial number", f"SP-{state.seed:07d}"),
        ("Battery", f"{state.battery_pct} %"),
        ("Apps", str(len(APPS))),
    ):
        column.add(row(f"about:{name}", y=column.y, label=name, text=name, detail=value))
    return column


def _slider(label: str, y: int, level: float, effect: Slide, glyph: str) -> Element:
    rect = Rect(x=0, y=y, width=WIDTH, height=36)
    return Element(
        element_id=f"slider:{effect.level}",
        label=label,
        kind="slider",
        rect=rect,
        effect=effect,
        level=level,
        glyph=glyph,
        paper=SETTINGS[glyph].paper,
        ink="#ffffff",
    )


def _navigation_bar() -> tuple[Element, ...]:
    third = WIDTH // 3
    return tuple(
        Element(
            element_id=f"nav:{button.value}",
            label=button.value.capitalize(),
            kind="nav",
            rect=Rect(x=i * third, y=NAV_TOP, width=third, height=HEIGHT - NAV_TOP),
            effect=Press(button=button),
            glyph=button.value,
        )
        for i, button in enumerate((Button.BACK, Button.HOME, Button.RECENTS))
    )
