"""Placing elements one below the other; the measures every screen shares, in logical units."""

from cua_rl.actions import Button
from cua_rl.devices.simulator.catalog import HEIGHT, WIDTH, Colour
from cua_rl.devices.simulator.elements import Effect, Element, Kind, Press, Rect

STATUS_HEIGHT = 16
CONTENT_TOP = 44
NAV_TOP = HEIGHT - 20
CONTENT_BOTTOM = NAV_TOP - 2
ROW_HEIGHT = 36
"""Seven rows fill the space between title and navigation bar."""
SLIDER_LEFT, SLIDER_RIGHT = 48, 176
"""Where a slider's track begins and ends."""


class Column:
    """Elements stacked from `top`; `y` is where the next one goes. `pinned` ones do not scroll."""

    def __init__(self, *, top: int) -> None:
        self.y = top
        self._elements: list[Element] = []
        self._pinned: list[Element] = []

    @property
    def elements(self) -> tuple[Element, ...]:
        """What scrolls, in reading order."""
        return tuple(self._elements)

    @property
    def pinned(self) -> tuple[Element, ...]:
        """What stays in place, in reading order."""
        return tuple(self._pinned)

    def add(self, *elements: Element) -> None:
        """Append elements that are already placed; the column grows to the lowest edge."""
        self._elements.extend(elements)
        self.y = max(self.y, *(element.rect.bottom for element in elements))

    def pin(self, *elements: Element) -> None:
        """Add elements that do not scroll."""
        self._pinned.extend(elements)

    def add_heading(self, text: str) -> None:
        """A small heading above a group of rows."""
        rect = Rect(x=14, y=self.y + 4, width=WIDTH - 28, height=16)
        self.add(Element(element_id=f"heading:{text}", label=text, kind="heading", rect=rect, text=text))

    def add_text(self, text: str, *, indent: int = 14) -> None:
        """A line of plain text."""
        rect = Rect(x=indent, y=self.y + 6, width=WIDTH - 2 * indent, height=14)
        self.add(Element(element_id=f"text:{self.y}", label=text, kind="text", rect=rect, text=text))


def title(text: str, *, y: int, height: int, indent: int = 12) -> Element:
    """The name of the screen, at its top."""
    rect = Rect(x=indent, y=y, width=WIDTH - indent - 12, height=height)
    return Element(element_id="title", label=text, kind="title", rect=rect, text=text)


def back_arrow() -> Element:
    """The arrow left of the title that leads one screen back."""
    rect = Rect(x=2, y=STATUS_HEIGHT, width=28, height=CONTENT_TOP - STATUS_HEIGHT)
    return Element(
        element_id="arrow", label="Up", kind="nav", rect=rect, effect=Press(button=Button.BACK), glyph="arrow"
    )


def row(
    element_id: str,
    *,
    y: int,
    label: str,
    text: str,
    detail: str = "",
    glyph: str = "",
    paper: Colour = "",
    ink: Colour = "#ffffff",
    effect: Effect | None = None,
    kind: Kind = "row",
    is_on: bool = False,
    height: int = ROW_HEIGHT,
) -> Element:
    """A row over the full width, with an icon on the left if `glyph` is given."""
    return Element(
        element_id=element_id,
        label=label,
        kind=kind,
        rect=Rect(x=0, y=y, width=WIDTH, height=height),
        effect=effect,
        text=text,
        detail=detail,
        glyph=glyph,
        paper=paper,
        ink=ink,
        is_on=is_on,
    )
