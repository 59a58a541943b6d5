"""The launcher: home pages, the drawer with all apps, menus of icons, folders, wallpapers."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import (
    ICON_SIZE,
    STORE_APPS,
    WALLPAPER_NAMES,
    WALLPAPERS,
    WIDTH,
    find_app,
    glyph_of,
)
from cua_rl.environments.phone.simulator.controls import (
    CONTENT_TOP,
    NAV_TOP,
    STATUS_HEIGHT,
    Box,
    Column,
    app_row,
    place,
    row,
    text_field,
)
from cua_rl.environments.phone.simulator.elements import Do, Effect, Element, Launch, Press, Push
from cua_rl.environments.phone.simulator.launcher.icons import apps_in_folder, folder_name, page_of
from cua_rl.environments.phone.simulator.navigation import subject
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.types.actions import Button

_BACK = Press(button=Button.BACK)
_WHOLE = (0, STATUS_HEIGHT, WIDTH, NAV_TOP - STATUS_HEIGHT)
"""Everything between the status bar and the navigation bar."""
_CELL_WIDTH, _CELL_HEIGHT, _INSET = 60, 60, 7
_TOUCH_MARGIN = 6
_ICON_WIDTH, _ICON_HEIGHT = ICON_SIZE + 2 * _TOUCH_MARGIN, ICON_SIZE + 2 * _TOUCH_MARGIN + 5


_CHOICE_TEXTS = {
    "Move": "Move to other page",
    "Remove": "Remove from home",
    "Group": "Group with an app",
    "Add": "Add to home screen",
}
_OVER_HOME = ("options", "menu", "entry", "uninstall", "group", "folder_of", "folder", "rename")
"""Names of the screens that leave the home page visible behind them, without what they are about."""


def menu_of_held(state: PhoneState, target: Element | None) -> str | None:
    """The menu that opens when an icon, or the wallpaper between the icons, is held; None elsewhere."""
    name = state.screen
    if name not in ("home", "home/drawer"):
        return None
    if target is None:
        return "options" if name == "home" else None
    if target.element_id.startswith("folder:"):
        return target.element_id
    if not target.element_id.startswith("app:"):
        return None
    return f"{'menu' if name == 'home' else 'entry'}:{target.element_id.removeprefix('app:')}"


def home_icons(state: PhoneState) -> tuple[Element, ...]:
    """The icons of the current home page, which can be touched a little beside their pictures."""
    places = state.home_pages[state.home_page]
    return tuple(_icon(place.app, place.x - _TOUCH_MARGIN, place.y - _TOUCH_MARGIN) for place in places)


def _icon(app: str, x: int, y: int) -> Element:
    folder = folder_name(app)
    if folder is not None:
        element_id, label, effect, glyph, paper, ink = app, folder, Push(subscreen=app), "apps", "#9aa3b5", "#ffffff"
    else:
        spec = find_app(app)
        element_id, label, effect, glyph = f"app:{app}", spec.label, Launch(app=app), glyph_of(app)
        paper, ink = spec.paper, spec.ink
    box = (x, y, _ICON_WIDTH, _ICON_HEIGHT)
    return place(element_id, label, "app_icon", box, effect=effect, text=label, glyph=glyph, paper=paper, ink=ink)


def icons_behind(state: PhoneState) -> tuple[Element, ...]:
    """The icons of the home page where the current screen lies on top of them; they cannot be tapped."""
    is_over_home = state.subscreens[-1].partition(":")[0] in _OVER_HOME
    return tuple(replace(icon, effect=None) for icon in home_icons(state)) if is_over_home else ()


def build_launcher(state: PhoneState) -> Column:
    column = Column(top=CONTENT_TOP)
    subscreen = state.subscreens[-1]
    match subscreen.partition(":")[0]:
        case "drawer":
            build_drawer(state, column)
        case "wallpapers":
            build_wallpapers(column)
        case "wallpaper":
            build_preview(state, column)
        case "group":
            build_partners(state, column)
        case "folder_of":
            _name_form(state, column, "New folder", Do(command="make_home_folder"), "Create")
        case "rename":
            _name_form(state, column, f"Rename {subject(state)}", Do(command="rename_home_folder"), "Save")
        case "folder":
            build_folder(state, column)
        case "uninstall":
            build_confirmation(state, column)
        case "options":
            _menu(column, "Home screen", [("Wallpapers", Push(subscreen="wallpapers"), "gallery", "#e0479e")])
        case _:
            _menu(column, find_app(subject(state)).label, _choices(state, subject(state), subscreen))
    return column


def build_drawer(state: PhoneState, column: Column) -> None:
    """All apps with these letters in their name."""
    column.pin(text_field(state, "drawer", "Search apps", (12, STATUS_HEIGHT + 3, WIDTH - 24, 24)))
    words = state.draft.strip().lower()
    found = [entry.app for entry in state.system.apps if words in find_app(entry.app).label.lower()]
    for i, app in enumerate(found):
        x = 6 + i % 3 * _CELL_WIDTH + _INSET
        column.add(_icon(app, x, CONTENT_TOP + 4 + i // 3 * _CELL_HEIGHT))
    if not found:
        nothing = (14, CONTENT_TOP + 12, WIDTH - 28, 14)
        column.pin(place("nothing", "Nothing", "text", nothing, text="No app has that name"))
    column.y += 4


_Choice = tuple[str, Effect, str, str]
"""Label, effect, glyph, colour."""


def _choices(state: PhoneState, app: str, subscreen: str) -> list[_Choice]:
    can_go: list[_Choice] = (
        [("Uninstall", Push(subscreen=f"uninstall:{app}"), "bin", "#d32f2f")] if app in STORE_APPS else []
    )
    if subscreen.startswith("menu:"):
        move: list[_Choice] = [("Move", Do(command="move_icon"), "play", "#2f6fed")]
        group: list[_Choice] = [("Group", Push(subscreen=f"group:{app}"), "apps", "#8a6a4a")]
        return [*move, ("Remove", Do(command="unpin_icon"), "do_not_disturb", "#5f6b7a"), *group, *can_go]
    if page_of(state.home_pages, app) is None:
        return [("Add", Do(command="pin_icon"), "plus", "#2e9e4f"), *can_go]
    return [("Open", Launch(app=app), glyph_of(app), find_app(app).paper), *can_go]


def _menu(column: Column, heading: str, choices: list[_Choice]) -> None:
    height = 34 + 36 * len(choices)
    top = 110
    column.pin(
        place("outside", "Outside", "text", (0, STATUS_HEIGHT, WIDTH, top - STATUS_HEIGHT), effect=_BACK),
        place("panel", "Panel", "panel", (0, top, WIDTH, height + 6)),
        place("menu_title", heading, "text", (14, top + 4, WIDTH - 28, 26), text=heading, ink="large"),
    )
    for i, (label, effect, glyph, paper) in enumerate(choices):
        column.pin(
            row(
                f"choice:{label}",
                y=top + 34 + 36 * i,
                label=label,
                text=_CHOICE_TEXTS.get(label, label),
                glyph=glyph,
                paper=paper,
                effect=effect,
            )
        )


def build_confirmation(state: PhoneState, column: Column) -> None:
    """The question before an app is uninstalled."""
    label = find_app(subject(state)).label
    column.pin(
        place("panel", "Panel", "panel", (10, 116, WIDTH - 20, 92)),
        place("question", "Question", "text", (20, 124, WIDTH - 40, 24), text=f"Uninstall {label}?", ink="large"),
        place("warning", "Warning", "text", (20, 148, WIDTH - 40, 14), text="Its data will be deleted.", ink="centre"),
        place("ok", "OK", "button", (60, 174, 72, 24), effect=Do(command="uninstall"), text="OK"),
    )


def build_wallpapers(column: Column) -> None:
    column.pin(*_headed_panel("Wallpapers", _WHOLE, (14, STATUS_HEIGHT + 2)))
    for i, name in enumerate(WALLPAPER_NAMES):
        y = CONTENT_TOP + 2 + 42 * i
        effect = Push(subscreen=f"wallpaper:{i}")
        column.pin(row(f"wallpaper:{i}", y=y, text=name, glyph="gallery", effect=effect, paper=WALLPAPERS[i][0]))


def build_preview(state: PhoneState, column: Column) -> None:
    """One wallpaper over the whole screen, to be set."""
    column.pin(
        place("preview", "Preview", "art", _WHOLE, glyph="wallpaper", text=subject(state)),
        place("set", "Set", "button", (60, 240, 72, 26), effect=Do(command="set_wallpaper"), text="Set"),
    )


def build_partners(state: PhoneState, column: Column) -> None:
    """The apps of the page that can be grouped with one."""
    app = subject(state)
    page = page_of(state.home_pages, app) or 0
    icons = [icon.app for icon in state.home_pages[page] if icon.app != app and folder_name(icon.app) is None]
    column.pin(*_headed_panel(f"Group {find_app(app).label} with", _WHOLE, (14, STATUS_HEIGHT + 2)))
    for i, other in enumerate(icons):
        column.pin(app_row(other, "partner", y=CONTENT_TOP + 36 * i, effect=Push(subscreen=f"folder_of:{app}:{other}")))


def build_folder(state: PhoneState, column: Column) -> None:
    name = subject(state)
    column.pin(*_headed_panel(name, (10, 84, WIDTH - 20, 136), (20, 90)))
    for i, app in enumerate(apps_in_folder(state, name)):
        column.pin(_icon(app, 34 + i % 2 * 78, 124 + i // 2 * 60))
    rename = Push(subscreen=f"rename:{name}")
    column.pin(place("rename", "Rename", "button", (60, 188, 72, 24), effect=rename, text="Rename"))


def _name_form(state: PhoneState, column: Column, heading: str, effect: Do, label: str) -> None:
    column.pin(
        *_headed_panel(heading, (10, 60, WIDTH - 20, 112), (20, 66)),
        text_field(state, "folder", "Name", (24, 98, WIDTH - 48, 26)),
        place(label.lower(), label, "button", (60, 136, 72, 24), effect=effect, text=label),
    )


def _headed_panel(heading: str, box: Box, at: tuple[int, int]) -> tuple[Element, Element]:
    x, y = at
    panel = place("panel", "Panel", "panel", box)
    return panel, place("heading", heading, "text", (x, y, WIDTH - 2 * x, 26), text=heading, ink="large")
