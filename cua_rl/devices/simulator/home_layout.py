"""The icons on the home pages: where there is room, adding, removing and moving them."""

from cua_rl.devices.simulator.catalog import NUM_ICONS_PER_PAGE
from cua_rl.devices.simulator.state import IconPlace

Pages = tuple[tuple[IconPlace, ...], ...]

_CELL_Y, CELL_WIDTH, CELL_HEIGHT = 46, 96, 60
_INSET_X, _INSET_Y = 31, 5


def page_of(pages: Pages, app: str) -> int | None:
    """The page with the app's icon."""
    return next((i for i, page in enumerate(pages) if app in [place.app for place in page]), None)


def add_icon(pages: Pages, app: str, *, page: int | None = None) -> Pages:
    """Put the app's icon into the first free cell: of this page, else of any, else of a new page."""
    wanted = range(len(pages)) if page is None else range(page, page + 1)
    free = next((i for i in wanted if i < len(pages) and len(pages[i]) < NUM_ICONS_PER_PAGE), None)
    if free is None:
        return (*pages, (_in_cell(app, 0),))
    taken = {_cell_of(place) for place in pages[free]}
    cell = min(set(range(NUM_ICONS_PER_PAGE)) - taken)
    filled = tuple(sorted((*pages[free], _in_cell(app, cell)), key=_cell_of))
    return (*pages[:free], filled, *pages[free + 1 :])


def remove_icon(pages: Pages, app: str) -> Pages:
    """Take the app's icon away; what it leaves stays free."""
    return tuple(tuple(place for place in page if place.app != app) for page in pages)


def move_icon(pages: Pages, app: str) -> Pages:
    """Move the app's icon to the next page, from the last one to the one before."""
    page = page_of(pages, app)
    if page is None:
        return pages
    target = page + 1 if page + 1 < len(pages) else page - 1
    return add_icon(remove_icon(pages, app), app, page=target)


def _cell_of(place: IconPlace) -> int:
    return (place.y - _CELL_Y) // CELL_HEIGHT * 2 + place.x // CELL_WIDTH


def _in_cell(app: str, cell: int) -> IconPlace:
    row, column = divmod(cell, 2)
    return IconPlace(app=app, x=column * CELL_WIDTH + _INSET_X, y=_CELL_Y + row * CELL_HEIGHT + _INSET_Y)
