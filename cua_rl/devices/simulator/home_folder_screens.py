"""The launcher's screens about folders of apps: making one, looking into it, renaming it."""

from cua_rl.devices.simulator.app_reducer import subject
from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.controls import place, text_field
from cua_rl.devices.simulator.elements import Do, Element, Launch, Push
from cua_rl.devices.simulator.home_folders import find_folder, folder_name
from cua_rl.devices.simulator.home_layout import page_of
from cua_rl.devices.simulator.layout import CONTENT_TOP, NAV_TOP, STATUS_HEIGHT, Column, row
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import find_app, glyph_of

FOLDER_SCREENS = ("group", "folder_of", "folder", "rename")
"""Names of these screens, without what they are about."""

_ICON_WIDTH, _ICON_HEIGHT = 46, 51


def build_folder_screen(state: PhoneState, column: Column) -> None:
    """One of `FOLDER_SCREENS`."""
    match state.subscreens[-1].partition(":")[0]:
        case "group":
            _partners(state, column)
        case "folder_of":
            _name_form(state, column, "New folder", Do(command="make_home_folder"), "Create")
        case "rename":
            _name_form(state, column, f"Rename {subject(state)}", Do(command="rename_home_folder"), "Save")
        case _:
            _folder(state, column)


def app_icon(app: str, x: int, y: int) -> Element:
    """An app's icon outside the home pages, with its top left corner."""
    spec = find_app(app)
    return place(
        f"app:{app}",
        spec.label,
        "app_icon",
        (x, y, _ICON_WIDTH, _ICON_HEIGHT),
        effect=Launch(app=app),
        text=spec.label,
        glyph=glyph_of(app),
        paper=spec.paper,
        ink=spec.ink,
    )


def _partners(state: PhoneState, column: Column) -> None:
    app = subject(state)
    page = page_of(state.home_pages, app) or 0
    icons = [icon.app for icon in state.home_pages[page] if icon.app != app and folder_name(icon.app) is None]
    heading = f"Group {find_app(app).label} with"
    column.pin(
        place("panel", "Panel", "panel", (0, STATUS_HEIGHT, WIDTH, NAV_TOP - STATUS_HEIGHT)),
        place("heading", heading, "text", (14, STATUS_HEIGHT + 2, WIDTH - 28, 26), text=heading, ink="large"),
    )
    for i, other in enumerate(icons):
        spec = find_app(other)
        column.pin(
            row(
                f"partner:{other}",
                y=CONTENT_TOP + 36 * i,
                label=spec.label,
                text=spec.label,
                glyph=glyph_of(other),
                paper=spec.paper,
                ink=spec.ink,
                effect=Push(subscreen=f"folder_of:{app}:{other}"),
            )
        )


def _name_form(state: PhoneState, column: Column, heading: str, effect: Do, label: str) -> None:
    column.pin(
        place("panel", "Panel", "panel", (10, 60, WIDTH - 20, 112)),
        place("heading", heading, "text", (20, 66, WIDTH - 40, 26), text=heading, ink="large"),
        text_field(state, "folder", "Name", (24, 98, WIDTH - 48, 26)),
        place(label.lower(), label, "button", (60, 136, 72, 24), effect=effect, text=label),
    )


def _folder(state: PhoneState, column: Column) -> None:
    name = subject(state)
    folder = find_folder(state, name)
    column.pin(
        place("panel", "Panel", "panel", (10, 84, WIDTH - 20, 136)),
        place("heading", name, "text", (20, 90, WIDTH - 40, 26), text=name, ink="large"),
    )
    for i, app in enumerate(folder.apps if folder else ()):
        column.pin(app_icon(app, 34 + i % 2 * 78, 124 + i // 2 * 60))
    rename = Push(subscreen=f"rename:{name}")
    column.pin(place("rename", "Rename", "button", (60, 188, 72, 24), effect=rename, text="Rename"))
