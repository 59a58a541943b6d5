"""Icons on the home pages, and folders of icons."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import ICON_SIZE, NUM_ICONS_PER_PAGE
from cua_rl.environments.phone.simulator.state import HomeFolder, IconPlace, PhoneState

Pages = tuple[tuple[IconPlace, ...], ...]

_CELL_Y, _CELL_WIDTH, _CELL_HEIGHT = 46, 96, 60
_INSET_X, _INSET_Y = (_CELL_WIDTH - ICON_SIZE) // 2, 5


_MARK = "folder:"


def page_of(pages: Pages, app: str) -> int | None:
    return next((i for i, page in enumerate(pages) if app in [place.app for place in page]), None)


def add_icon(pages: Pages, app: str, *, page: int | None = None) -> Pages:
    """Put the app's icon into the first free cell: of this page, else of any, else of a new page."""
    wanted = range(len(pages)) if page is None else range(page, page + 1)
    free = next((i for i in wanted if i < len(pages) and len(pages[i]) < NUM_ICONS_PER_PAGE), None)
    if free is None:
        return (*pages, (in_cell(app, 0),))
    taken = {_cell_of(place) for place in pages[free]}
    cell = min(set(range(NUM_ICONS_PER_PAGE)) - taken)
    filled = tuple(sorted((*pages[free], in_cell(app, cell)), key=_cell_of))
    return (*pages[:free], filled, *pages[free + 1 :])


def remove_icon(pages: Pages, app: str) -> Pages:
    return tuple(tuple(place for place in page if place.app != app) for page in pages)


def move_icon(pages: Pages, app: str) -> Pages:
    """Move the app's icon to the next page, from the last one to the one before."""
    page = page_of(pages, app)
    if page is None:
        return pages
    target = page + 1 if page + 1 < len(pages) else page - 1
    return add_icon(remove_icon(pages, app), app, page=target)


def _cell_of(place: IconPlace) -> int:
    return (place.y - _CELL_Y) // _CELL_HEIGHT * 2 + place.x // _CELL_WIDTH


def in_cell(app: str, cell: int) -> IconPlace:
    """The icon in the middle of a cell; cells are numbered in reading order."""
    row, column = divmod(cell, 2)
    return IconPlace(app=app, x=column * _CELL_WIDTH + _INSET_X, y=_CELL_Y + row * _CELL_HEIGHT + _INSET_Y)


def folder_name(icon: str) -> str | None:
    """The name of the folder that an icon stands for; None for an app's icon."""
    return icon.removeprefix(_MARK) if icon.startswith(_MARK) else None


def apps_in_folder(state: PhoneState, name: str) -> tuple[str, ...]:
    """The apps in the folder of this name; none if there is no such folder."""
    return next((folder.apps for folder in state.apps.home_folders if folder.name == name), ())


def _is_free(state: PhoneState, name: str) -> bool:
    """Whether a folder can get this name; a colon would end it in the names of screens."""
    return bool(name) and ":" not in name and name not in [folder.name for folder in state.apps.home_folders]


def make_folder(state: PhoneState, name: str, app: str, other: str) -> PhoneState:
    """Group two apps in a new folder in place of `other`; does nothing if the name is taken."""
    if not _is_free(state, name):
        return state
    pages = _with_icon(remove_icon(state.home_pages, app), other, f"{_MARK}{name}")
    folder = HomeFolder(name=name, apps=(other, app))
    return _with_folders(replace(state, home_pages=pages), *state.apps.home_folders, folder)


def rename_folder(state: PhoneState, name: str, new_name: str) -> PhoneState:
    """Rename a folder; does nothing if the name is taken."""
    if not _is_free(state, new_name):
        return state
    folders = (replace(f, name=new_name) if f.name == name else f for f in state.apps.home_folders)
    pages = _with_icon(state.home_pages, f"{_MARK}{name}", f"{_MARK}{new_name}")
    return _with_folders(replace(state, home_pages=pages), *folders)


def drop_from_folders(state: PhoneState, app: str) -> PhoneState:
    """Remove an app from its folder, and the folder once it is empty."""
    folders = [replace(f, apps=tuple(other for other in f.apps if other != app)) for f in state.apps.home_folders]
    pages = state.home_pages
    for folder in folders:
        pages = pages if folder.apps else remove_icon(pages, f"{_MARK}{folder.name}")
    return _with_folders(replace(state, home_pages=pages), *(folder for folder in folders if folder.apps))


def _with_icon(pages: Pages, icon: str, new_icon: str) -> Pages:
    return tuple(tuple(replace(p, app=new_icon) if p.app == icon else p for p in page) for page in pages)


def _with_folders(state: PhoneState, *folders: HomeFolder) -> PhoneState:
    return replace(state, apps=replace(state.apps, home_folders=folders))
