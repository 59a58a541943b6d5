"""Drawing what only system pages, dialogs and the shade consist of."""

from cua_rl.devices.simulator.canvas import Canvas
from cua_rl.devices.simulator.catalog import Palette
from cua_rl.devices.simulator.elements import Element, Rect

_SMALL_TILE_WIDTH = 60


def draw_system_element(canvas: Canvas, element: Element, palette: Palette) -> None:
    """Draw an element of a kind that the plain screens do not have."""
    match element.kind:
        case "tile":
            _draw_tile(canvas, element, palette)
        case "notification":
            _draw_notification(canvas, element, palette)
        case "meter":
            _draw_meter(canvas, element, palette)
        case "swatch":
            _draw_swatch(canvas, element, palette)
        case "scrim":
            canvas.dim(element.rect)
        case "card":
            canvas.rounded(element.rect, palette.surface, radius=12)
        case "card_title":
            x, y = element.rect.x, element.rect.centre[1]
            canvas.text(x, y, element.text, palette.text, size=13, max_width=element.rect.width)
        case _:
            _draw_pill(canvas, element, palette)


def _draw_pill(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    canvas.rounded(rect, palette.divider, radius=rect.height / 2)
    ink = palette.accent if element.is_tappable else palette.muted
    x, y = rect.centre
    canvas.text(x, y, element.text, ink, size=10, anchor="mm", max_width=rect.width - 4)


def _draw_tile(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    paper, ink = (palette.accent, palette.on_accent) if element.is_on else (palette.divider, palette.text)
    canvas.rounded(rect, paper, radius=14)
    middle = rect.centre[1]
    if rect.width < _SMALL_TILE_WIDTH:
        box = Rect(x=rect.centre[0] - 9, y=middle - 9, width=18, height=18)
        canvas.glyph(element.glyph, box, ink=ink, paper=paper)
        return
    canvas.glyph(element.glyph, Rect(x=rect.x + 8, y=middle - 9, width=18, height=18), ink=ink, paper=paper)
    canvas.text(rect.x + 31, middle - 6, element.text, ink, size=10, max_width=rect.width - 33)
    canvas.text(rect.x + 31, middle + 7, "On" if element.is_on else "Off", ink, size=8)


def _draw_notification(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    canvas.rounded(rect, palette.surface, radius=10)
    middle = rect.centre[1]
    box = Rect(x=rect.x + 7, y=middle - 12, width=24, height=24)
    canvas.icon(element.glyph, box, ink=element.ink, paper=element.paper, radius=12)
    x, width = rect.x + 38, rect.width - 46
    canvas.text(x, middle - 7, element.text, palette.text, size=11, max_width=width)
    canvas.text(x, middle + 8, element.detail, palette.muted, size=9, max_width=width)


def _draw_meter(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    canvas.text(rect.x + 2, rect.y + 9, element.text, palette.text, size=10, max_width=rect.width)
    bar = Rect(x=rect.x, y=rect.y + 20, width=rect.width, height=8)
    canvas.rounded(bar, palette.track, radius=4)
    full = Rect(x=bar.x, y=bar.y, width=max(8, round(bar.width * element.level)), height=bar.height)
    canvas.rounded(full, palette.accent, radius=4)


def _draw_swatch(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    if element.is_on:
        frame = Rect(x=rect.x - 3, y=rect.y - 3, width=rect.width + 6, height=rect.height + 6)
        canvas.fill(frame, palette.accent)
    canvas.gradient(rect, element.paper, element.ink)
    canvas.rounded(Rect(x=rect.x + 6, y=rect.y + 8, width=rect.width - 12, height=6), "#ffffff", radius=3)
    if element.is_tappable:
        canvas.text(rect.centre[0], rect.bottom + 9, element.text, palette.text, size=9, anchor="mm")
