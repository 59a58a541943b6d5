"""The pages that the browser can reach: a small web that is saved on the phone, and a search over it."""

from dataclasses import dataclass

SEARCH = "search:"
"""What the address of a page of search results begins with."""


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
BOOKMARKS = ("news.example", "recipes.example", "trains.example", "library.example")


def read_address(typed: str) -> str:
    """What the address bar opens: an address if it looks like one, else a search."""
    text = typed.strip()
    bare = text.lower().removeprefix("https://").removeprefix("http://").removeprefix("www.").rstrip("/")
    return bare if "." in bare and " " not in bare else f"{SEARCH}{text}"


def find_pages(words: str) -> tuple[WebPage, ...]:
    """Pages with one of the words, those with more of them first."""
    wanted = words.lower().split()
    scores = [(sum(word in _text(page) for word in wanted), page) for page in _ALL]
    return tuple(page for score, page in sorted(scores, key=lambda item: -item[0]) if score)


def _text(page: WebPage) -> str:
    return " ".join((page.address, page.title, *page.lines)).lower()
