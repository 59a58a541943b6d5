"""The browser: bookmarks, pages with links and files, search results."""

from cua_rl.devices.simulator.browser_pages import BOOKMARKS, SEARCH, WEB_PAGES, WebPage, find_pages
from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.controls import place, text_field, wide_button
from cua_rl.devices.simulator.elements import Do, Push
from cua_rl.devices.simulator.file_tree import DOWNLOADS, exists
from cua_rl.devices.simulator.layout import CONTENT_TOP, Column, row
from cua_rl.devices.simulator.state import PhoneState

_CYAN = "#16b5cf"


def build_chrome(state: PhoneState, column: Column) -> None:
    """The address bar and the bookmarks."""
    column.add(text_field(state, "address", "Search or type address", (10, CONTENT_TOP + 2, WIDTH - 20, 26)))
    column.add_heading("Bookmarks")
    for address in BOOKMARKS:
        _add_link(column, WEB_PAGES[address], "bookmark")


def _add_link(column: Column, page: WebPage, kind: str, *, detail: str = "") -> None:
    column.add(
        row(
            f"{kind}:{page.address}",
            y=column.y,
            label=page.title,
            text=page.title,
            detail=detail,
            glyph="chrome",
            paper=_CYAN,
            effect=Push(subscreen=page.address),
        )
    )


def build_chrome_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """The page at an address, or what a search found."""
    shown = subscreen.removeprefix(SEARCH)
    column.add(text_field(state, "address", f"{shown}", (10, CONTENT_TOP + 2, WIDTH - 20, 26)))
    if subscreen.startswith(SEARCH):
        return _results(column, shown)
    page = WEB_PAGES.get(subscreen)
    if page is None:
        column.add_heading("This site cannot be reached")
        column.add_text("Check the address, or search")
        return "Not found"
    return _page(state, column, page)


def _results(column: Column, words: str) -> str:
    found = find_pages(words)
    column.add_heading(f"{len(found)} results")
    for page in found:
        _add_link(column, page, "result", detail=page.address)
    return "Search"


def _page(state: PhoneState, column: Column, page: WebPage) -> str:
    column.y += 6
    banner = (12, column.y, WIDTH - 24, 54)
    column.add(place("banner", "Banner", "art", banner, glyph="banner", text=page.title))
    for line in page.lines:
        column.add_text(line)
    column.y += 6
    for address in page.links:
        _add_link(column, WEB_PAGES[address], "link", detail=address)
    if page.file is not None:
        column.add(wide_button("Download", column.y + 6, Do(command="download"), text=f"Download {page.file}"))
        if exists(state, f"{DOWNLOADS}{page.file}"):
            column.add_text("Saved in Downloads")
    return page.title
