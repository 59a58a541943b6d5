"""Browser: a small web that is saved on the phone, with bookmarks, pages, links, files and a search."""

from dataclasses import dataclass

from cua_rl.environments.phone.simulator.apps.files import DOWNLOADS, add_file, exists
from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import CONTENT_TOP, Column, place, row, text_field, wide_button
from cua_rl.environments.phone.simulator.elements import Do, Push
from cua_rl.environments.phone.simulator.navigation import show
from cua_rl.environments.phone.simulator.state import PhoneState

SEARCH = "search:"
"""What the address of a page of search results begins with."""


BOOKMARKS = ("news.example", "recipes.example", "trains.example", "library.example")
_CYAN = "#16b5cf"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPage:
    """One page: its text, where its links lead, the file it offers."""

    address: str
    title: str
    lines: tuple[str, ...]
    links: tuple[str, ...] = ()
    """Addresses."""
    file: str | None = None


_ALL = (
    WebPage(
        address="news.example",
        title="News",
        lines=("Bridge reopens after repairs", "Rain expected until Friday", "Choir wins first prize"),
        links=("weather.example", "sport.example"),
    ),
    WebPage(
        address="recipes.example",
        title="Recipes",
        lines=("Lentil soup, 30 minutes", "Apple cake, one hour"),
        links=("soup.example", "cake.example"),
    ),
    WebPage(
        address="trains.example",
        title="Trains",
        lines=("Departures every half hour", "Delays: none"),
        links=("map.example",),
    ),
    WebPage(
        address="library.example",
        title="Library",
        lines=("Open from nine to six", "New books on Mondays"),
        links=("books.example",),
    ),
    WebPage(address="weather.example", title="Weather", lines=("Mild, light wind from the west",)),
    WebPage(address="sport.example", title="Sport", lines=("Home team wins two to one",)),
    WebPage(address="soup.example", title="Soup", lines=("Onion, lentils, carrots", "Simmer for half an hour")),
    WebPage(address="cake.example", title="Cake", lines=("Apples, flour, butter", "Bake until golden")),
    WebPage(address="map.example", title="Network", lines=("All lines on one page",), file="network.pdf"),
    WebPage(address="books.example", title="Books", lines=("Ten stories for the summer",), file="catalogue.pdf"),
    WebPage(
        address="brand.example",
        title="Brand",
        lines=("Our logo, free to use", "with credit to its maker"),
        file="logo.svg",
    ),
    WebPage(
        address="studio.example",
        title="Studio",
        lines=("Our logo for the press", "and how to use it"),
        file="emblem.svg",
    ),
    WebPage(address="garden.example", title="Garden", lines=("When to plant tomatoes",), links=("soup.example",)),
    WebPage(address="museum.example", title="Museum", lines=("Free on the first Sunday",), file="plan.pdf"),
    WebPage(address="cinema.example", title="Cinema", lines=("Tonight at eight: Low Tide",)),
)
WEB_PAGES: dict[str, WebPage] = {page.address: page for page in _ALL}


def read_address(typed: str) -> str:
    """What the address bar opens: an address if it looks like one, else a search."""
    text = typed.strip()
    bare = text.lower().removeprefix("https://").removeprefix("http://").removeprefix("www.").rstrip("/")
    return bare if "." in bare and " " not in bare else f"{SEARCH}{text}"


def find_pages(words: str) -> tuple[WebPage, ...]:
    """Pages with one of the words, those with more of them first."""
    wanted = words.lower().split()
    texts = [" ".join((page.address, page.title, *page.lines)).lower() for page in _ALL]
    scores = [(sum(word in text for word in wanted), page) for text, page in zip(texts, _ALL, strict=True)]
    return tuple(page for score, page in sorted(scores, key=lambda item: -item[0]) if score)


def build_chrome(state: PhoneState, column: Column) -> None:
    column.add(text_field(state, "address", "Search or type address", (10, CONTENT_TOP + 2, WIDTH - 20, 26)))
    column.add_heading("Bookmarks")
    for address in BOOKMARKS:
        _add_link(column, WEB_PAGES[address], "bookmark")


def _add_link(column: Column, page: WebPage, kind: str, *, detail: str = "") -> None:
    column.stack(
        row(
            f"{kind}:{page.address}",
            text=page.title,
            detail=detail,
            glyph="chrome",
            paper=_CYAN,
            effect=Push(subscreen=page.address),
        )
    )


def build_chrome_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """The page at an address, or the results of a search."""
    shown = subscreen.removeprefix(SEARCH)
    column.add(text_field(state, "address", shown, (10, CONTENT_TOP + 2, WIDTH - 20, 26)))
    if subscreen.startswith(SEARCH):
        found = find_pages(shown)
        column.add_heading(f"{len(found)} results")
        for result in found:
            _add_link(column, result, "result", detail=result.address)
        return "Search"
    page = WEB_PAGES.get(subscreen)
    if page is None:
        column.add_heading("This site cannot be reached")
        column.add_text("Check the address, or search")
        return "Not found"
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


def open_address(state: PhoneState) -> PhoneState:
    """Open the address that was typed, or search for the words."""
    if not state.draft.strip():
        return state
    return show(state, "chrome", *state.subscreens, read_address(state.draft))


def download(state: PhoneState) -> PhoneState:
    """Save the file that the page offers."""
    page = WEB_PAGES.get(state.subscreens[-1])
    return state if page is None or page.file is None else add_file(state, f"{DOWNLOADS}{page.file}")
