"""From state to screen: which app's screen shows, and the frame around it."""

from cua_rl.environments.phone.simulator import controls
from cua_rl.environments.phone.simulator.apps.screens import build_app
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH
from cua_rl.environments.phone.simulator.elements import Do, Element, Launch, Push, Rect, Screen
from cua_rl.environments.phone.simulator.keyboard import KEYBOARD_HEIGHT, keyboard_elements
from cua_rl.environments.phone.simulator.launcher.screens import build_launcher, home_icons, icons_behind
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.phone.simulator.system.dialogs import is_dialog, with_dialog
from cua_rl.environments.phone.simulator.system.settings import build_settings
from cua_rl.environments.phone.simulator.system.shade import build_shade

_HOME_VIEWPORT = Rect(x=0, y=controls.STATUS_HEIGHT, width=WIDTH, height=controls.NAV_TOP - controls.STATUS_HEIGHT)


def build_screen(state: PhoneState) -> Screen:
    """What the phone shows, scrolled as the state says."""
    if not state.is_screen_on:
        return Screen(name="off", content=(), viewport=Rect(x=0, y=0, width=WIDTH, height=HEIGHT))
    if state.shade is not None:
        return build_shade(state)
    if state.is_recents_open:
        return _recents(state)
    if state.app is not None:
        heading, column = build_settings(state) if state.app == "settings" else build_app(state, state.app)
        back = () if not state.subscreens else (controls.back_arrow(),)
        bar = controls.title(
            heading,
            y=controls.STATUS_HEIGHT,
            height=controls.CONTENT_TOP - controls.STATUS_HEIGHT,
            indent=30 if back else 12,
        )
        screen = _scrolled(state, column, bottom=controls.CONTENT_BOTTOM, above=(bar, *back))
        is_asking = bool(state.subscreens) and is_dialog(state.subscreens[-1])
        return with_dialog(screen, state.subscreens[-1]) if is_asking else screen
    if state.subscreens:
        return _scrolled(state, build_launcher(state), bottom=controls.NAV_TOP, behind=icons_behind(state))
    search = controls.place("search", "Search", "text", (16, 20, WIDTH - 32, 20), effect=Push(subscreen="drawer"))
    fixed = (search, *controls.navigation_bar())
    return Screen(name="home", content=home_icons(state), fixed=fixed, viewport=_HOME_VIEWPORT)


def _recents(state: PhoneState) -> Screen:
    column = controls.Column(top=controls.STATUS_HEIGHT + 6)
    column.add(controls.title("Recent apps", y=column.y, height=26))
    for app in state.recent_apps[:5]:
        column.stack(controls.app_row(app, "recent", effect=Launch(app=app), height=42))
    if state.recent_apps:
        y = column.y + 6
        clear, shoot = Do(command="clear_recents"), Do(command="take_screenshot")
        column.add(
            controls.place("clear", "Clear", "button", (12, y, 76, 22), effect=clear, text="Clear all"),
            controls.place("screenshot", "Screenshot", "button", (104, y, 76, 22), effect=shoot, text="Screenshot"),
        )
    else:
        column.add_text("Nothing has been opened yet", indent=14)
    return Screen(name="recents", content=column.elements, fixed=controls.navigation_bar(), viewport=_HOME_VIEWPORT)


def _scrolled(
    state: PhoneState,
    column: controls.Column,
    *,
    bottom: int,
    behind: tuple[Element, ...] = (),
    above: tuple[Element, ...] = (),
) -> Screen:
    """The column between the title and `bottom`, or the keyboard if it shows."""
    keyboard = () if state.focus is None else keyboard_elements(state.keyboard)
    bottom = bottom if state.focus is None else controls.NAV_TOP - KEYBOARD_HEIGHT
    max_scroll = max(0, column.y - bottom)
    scroll = min(state.scroll, max_scroll)
    return Screen(
        name=state.screen,
        content=(*behind, *(element.scrolled(scroll) for element in column.elements)),
        fixed=(*above, *column.pinned, *keyboard, *controls.navigation_bar()),
        viewport=Rect(x=0, y=controls.CONTENT_TOP, width=WIDTH, height=bottom - controls.CONTENT_TOP),
        max_scroll=max_scroll,
    )
