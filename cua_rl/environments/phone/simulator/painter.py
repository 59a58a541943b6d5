"""From screen to picture: one function per kind of element."""

import io
from collections.abc import Callable

from PIL import Image

from cua_rl.environments.phone.simulator.artwork import draw_art, draw_photo
from cua_rl.environments.phone.simulator.canvas import Canvas, text_width
from cua_rl.environments.phone.simulator.catalog import (
    DARK,
    HEIGHT,
    ICON_SIZE,
    LIGHT,
    MAX_VOLUME,
    WALLPAPERS,
    WIDTH,
    Palette,
    Toggle,
)
from cua_rl.environments.phone.simulator.controls import NAV_TOP, SLIDER_LEFT, SLIDER_RIGHT, STATUS_HEIGHT
from cua_rl.environments.phone.simulator.elements import Element, Kind, Rect
from cua_rl.environments.phone.simulator.keyboard import KEYBOARD_HEIGHT
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.state import PhoneState

_PNG_COMPRESS_LEVEL = 1  # four times as fast as the default, for files a third larger


_SMALL_TILE_WIDTH = 60


def draw_png(state: PhoneState, scale: int) -> bytes:
    """The phone's screen as an encoded PNG of 192 x 320 units times `scale`."""
    buffer = io.BytesIO()
    draw_phone(state, scale).save(buffer, "PNG", compress_level=_PNG_COMPRESS_LEVEL)
    return buffer.getvalue()


def draw_phone(state: PhoneState, scale: int) -> Image.Image:
    if not state.is_screen_on:
        return Canvas(scale, "#000000").image
    palette = DARK if state.is_on(Toggle.DARK_THEME) else LIGHT
    canvas = Canvas(scale, palette.background)
    screen = build_screen(state)
    is_home = screen.name.partition("/")[0] == "home"
    if is_home:
        _draw_wallpaper(canvas, state)
    before = canvas.image.copy()
    for element in screen.content:
        if element.rect.bottom > screen.viewport.y and element.rect.y < screen.viewport.bottom:
            _DRAW[element.kind](canvas, element, palette)
    canvas.keep_inside(screen.viewport, before)
    on_top = Palette.on_wallpaper() if is_home else palette
    if state.focus is not None:
        canvas.fill(Rect(x=0, y=NAV_TOP - KEYBOARD_HEIGHT, width=WIDTH, height=KEYBOARD_HEIGHT), on_top.divider)
    for element in screen.fixed:
        _DRAW[element.kind](canvas, element, on_top)
    _draw_status_bar(canvas, state, on_top)
    if state.is_volume_shown:
        _draw_volume(canvas, state, palette)
    return canvas.image


def _draw_wallpaper(canvas: Canvas, state: PhoneState) -> None:
    whole = Rect(x=0, y=0, width=WIDTH, height=HEIGHT)
    top, bottom = WALLPAPERS[state.wallpaper]
    canvas.gradient(whole, *((bottom, "#0b0c10") if state.is_on(Toggle.DARK_THEME) else (top, bottom)))
    if state.subscreens:
        return
    canvas.rounded(Rect(x=16, y=20, width=WIDTH - 32, height=20), "#ffffff", radius=10)
    canvas.glyph("search", Rect(x=23, y=25, width=10, height=10), ink="#6a7079", paper="#ffffff")
    canvas.text(40, 30, "Search", "#6a7079", size=9)
    for i in range(len(state.home_pages)):
        colour = "#ffffff" if i == state.home_page else "#8b93a3"
        canvas.rounded(Rect(x=WIDTH // 2 - 8 + i * 10, y=290, width=6, height=6), colour, radius=3)


def _draw_status_bar(canvas: Canvas, state: PhoneState, palette: Palette) -> None:
    canvas.text(8, STATUS_HEIGHT / 2 + 1, state.clock, palette.text, size=9)
    canvas.text(WIDTH - 8, STATUS_HEIGHT / 2 + 1, f"{state.battery_pct}%", palette.text, size=8, anchor="rm")
    x = WIDTH - 42
    saver = "#f59f00" if state.is_on(Toggle.BATTERY_SAVER) else palette.text
    canvas.glyph(
        "battery_saver" if state.is_on(Toggle.BATTERY_SAVER) else "battery",
        Rect(x=x, y=3, width=11, height=11),
        ink=saver,
        paper=palette.background,
    )
    for toggle in (Toggle.AIRPLANE_MODE, Toggle.WIFI, Toggle.BLUETOOTH, Toggle.DO_NOT_DISTURB, Toggle.LOCATION):
        if state.is_on(toggle):
            x -= 14
            canvas.glyph(toggle.value, Rect(x=x, y=3, width=11, height=11), ink=palette.text, paper=palette.background)


def _draw_volume(canvas: Canvas, state: PhoneState, palette: Palette) -> None:
    canvas.rounded(Rect(x=WIDTH - 30, y=80, width=22, height=110), palette.divider, radius=11)
    track = Rect(x=WIDTH - 23, y=90, width=8, height=80)
    canvas.rounded(track, palette.track, radius=4)
    height = max(8, round(track.height * state.media_volume / MAX_VOLUME))
    canvas.rounded(Rect(x=track.x, y=track.bottom - height, width=8, height=height), palette.accent, radius=4)
    canvas.glyph("sound", Rect(x=WIDTH - 24, y=175, width=10, height=10), ink=palette.text, paper=palette.divider)


def draw_app_icon(canvas: Canvas, element: Element, palette: Palette) -> None:
    left = element.rect.centre[0] - ICON_SIZE // 2
    top = element.rect.y + 6
    rect = Rect(x=left, y=top, width=ICON_SIZE, height=ICON_SIZE)
    canvas.icon(element.glyph, rect, ink=element.ink, paper=element.paper, radius=9)
    canvas.text(element.rect.centre[0], top + ICON_SIZE + 7, element.text, "#ffffff", size=9, anchor="mm")


def _draw_row(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect, is_on = element.rect, element.is_on
    middle = rect.centre[1]
    x, right = 14, WIDTH - 14
    if element.glyph:
        box = Rect(x=10, y=middle - 14, width=28, height=28)
        canvas.icon(element.glyph, box, ink=element.ink, paper=element.paper, radius=8)
        x = 46
    paper = palette.accent if is_on else palette.track
    if element.kind == "switch_row":
        right -= 36
        canvas.rounded(Rect(x=right + 4, y=middle - 9, width=32, height=18), paper, radius=9)
        knob = Rect(x=right + (20 if is_on else 6), y=middle - 7, width=14, height=14)
        canvas.rounded(knob, palette.on_accent if is_on else palette.surface, radius=7)
    elif element.kind == "choice_row":
        right -= 20
        canvas.rounded(Rect(x=right + 4, y=middle - 7, width=14, height=14), paper, radius=7)
        canvas.rounded(Rect(x=right + 6, y=middle - 5, width=10, height=10), palette.background, radius=5)
        if is_on:
            canvas.rounded(Rect(x=right + 8, y=middle - 3, width=6, height=6), palette.accent, radius=3)
    text_y = middle - 6 if element.detail else middle + 1
    canvas.text(x, text_y, element.text, palette.text, size=11, max_width=right - x)
    canvas.text(x, middle + 8, element.detail, palette.muted, size=9, max_width=right - x)
    canvas.fill(Rect(x=x, y=rect.bottom - 1, width=WIDTH - x, height=1), palette.divider)


def draw_slider(canvas: Canvas, element: Element, palette: Palette) -> None:
    middle = element.rect.centre[1]
    box = Rect(x=10, y=middle - 14, width=28, height=28)
    canvas.icon(element.glyph, box, ink=element.ink, paper=element.paper, radius=8)
    width = SLIDER_RIGHT - SLIDER_LEFT
    knob = SLIDER_LEFT + round(width * element.level)
    canvas.rounded(Rect(x=SLIDER_LEFT, y=middle - 3, width=width, height=6), palette.track, radius=3)
    canvas.rounded(
        Rect(x=SLIDER_LEFT, y=middle - 3, width=max(6, knob - SLIDER_LEFT), height=6), palette.accent, radius=3
    )
    canvas.rounded(Rect(x=knob - 9, y=middle - 9, width=18, height=18), palette.accent, radius=9)


def draw_nav(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A button of the navigation bar, or the arrow back."""
    x, y = element.rect.centre
    canvas.glyph(element.glyph, Rect(x=x - 6, y=y - 6, width=12, height=12), ink=palette.text, paper=palette.background)


def draw_text(canvas: Canvas, element: Element, palette: Palette) -> None:
    """Plain text; `ink` names its size or place."""
    rect = element.rect
    x, y = rect.centre
    match element.ink:
        case "huge":
            canvas.text(x, y, element.text, palette.text, size=40, anchor="mm")
        case "large":
            canvas.text(x, y, element.text, palette.text, size=16, anchor="mm", max_width=rect.width)
        case "centre":
            canvas.text(x, y, element.text, palette.muted, size=10, anchor="mm", max_width=rect.width)
        case "right":
            canvas.rounded(rect, palette.surface, radius=8)
            canvas.text(rect.right - 10, y, element.text, palette.text, size=20, anchor="rm", max_width=rect.width - 20)
        case _:
            canvas.text(rect.x, y, element.text, palette.text, size=10, max_width=rect.width)


def draw_bubble(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A text message, on its sender's side."""
    rect = element.rect
    width = min(rect.width, round(text_width(element.text, 10)) + 20)
    x = rect.right - width if element.is_on else rect.x
    paper, ink = (palette.accent, palette.on_accent) if element.is_on else (palette.surface, palette.text)
    canvas.rounded(Rect(x=x, y=rect.y, width=width, height=rect.height), paper, radius=12)
    canvas.text(x + 10, rect.centre[1], element.text, ink, size=10, max_width=width - 16)


def draw_field(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A text field, with the cursor if it has the focus."""
    rect = element.rect
    canvas.rounded(rect, palette.accent if element.is_on else palette.track, radius=8)
    canvas.rounded(rect.inset(1), palette.surface, radius=7)
    ink = palette.muted if element.ink == "hint" else palette.text
    lines = _wrap(element.text, rect.width - 20)[-max(1, (rect.height - 8) // 14) :]
    for i, line in enumerate(lines):
        canvas.text(rect.x + 9, rect.y + 13 + 14 * i, line, ink, size=10, max_width=rect.width - 18)
    if element.is_on:
        x = rect.x + 10 + round(text_width(lines[-1], 10)) if element.ink != "hint" else rect.x + 9
        canvas.fill(Rect(x=x, y=rect.y + 6 + 14 * (len(lines) - 1), width=1, height=13), palette.accent)


def _wrap(text: str, max_width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, 10) > max_width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines


def draw_pill(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A plain button, grey if it does nothing."""
    rect = element.rect
    canvas.rounded(rect, palette.divider, radius=rect.height / 2)
    ink = palette.accent if element.is_tappable else palette.muted
    x, y = rect.centre
    canvas.text(x, y, element.text, ink, size=10, anchor="mm", max_width=rect.width - 4)


def draw_tile(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A quick setting; small ones have no words."""
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


def draw_notification(canvas: Canvas, element: Element, palette: Palette) -> None:
    rect = element.rect
    canvas.rounded(rect, palette.surface, radius=10)
    middle = rect.centre[1]
    box = Rect(x=rect.x + 7, y=middle - 12, width=24, height=24)
    canvas.icon(element.glyph, box, ink=element.ink, paper=element.paper, radius=12)
    x, width = rect.x + 38, rect.width - 46
    canvas.text(x, middle - 7, element.text, palette.text, size=11, max_width=width)
    canvas.text(x, middle + 8, element.detail, palette.muted, size=9, max_width=width)


def draw_meter(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A bar that shows how full something is."""
    rect = element.rect
    canvas.text(rect.x + 2, rect.y + 9, element.text, palette.text, size=10, max_width=rect.width)
    bar = Rect(x=rect.x, y=rect.y + 20, width=rect.width, height=8)
    canvas.rounded(bar, palette.track, radius=4)
    full = Rect(x=bar.x, y=bar.y, width=max(8, round(bar.width * element.level)), height=bar.height)
    canvas.rounded(full, palette.accent, radius=4)


def draw_swatch(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A small wallpaper, framed if it is in use."""
    rect = element.rect
    if element.is_on:
        canvas.fill(rect.inset(-3), palette.accent)
    canvas.gradient(rect, element.paper, element.ink)
    canvas.rounded(Rect(x=rect.x + 6, y=rect.y + 8, width=rect.width - 12, height=6), "#ffffff", radius=3)
    if element.is_tappable:
        canvas.text(rect.centre[0], rect.bottom + 9, element.text, palette.text, size=9, anchor="mm")


def draw_caption(canvas: Canvas, element: Element, palette: Palette) -> None:
    """The name of the screen, a heading above rows, or the question of a dialog."""
    rect = element.rect
    shift, colour, size = {
        "title": (1, palette.text, 15),
        "heading": (0, palette.accent, 9),
        "card_title": (0, palette.text, 13),
    }[element.kind]
    canvas.text(rect.x, rect.centre[1] + shift, element.text, colour, size=size, max_width=rect.width)


def _draw_surface(canvas: Canvas, element: Element, palette: Palette) -> None:
    canvas.rounded(element.rect, palette.surface, radius=12)


def draw_key(canvas: Canvas, element: Element, palette: Palette) -> None:
    canvas.rounded(element.rect.inset(1), palette.surface, radius=4)
    x, y = element.rect.centre
    canvas.text(x, y, element.text, palette.text, size=9 if len(element.text) > 1 else 12, anchor="mm")


def draw_button(canvas: Canvas, element: Element, palette: Palette) -> None:
    canvas.rounded(element.rect, palette.accent, radius=min(11, element.rect.height // 2))
    x, y = element.rect.centre
    canvas.text(x, y, element.text, palette.on_accent, size=10, anchor="mm")


def draw_round_button(canvas: Canvas, element: Element, palette: Palette) -> None:
    canvas.icon(element.glyph, element.rect, ink="#ffffff", paper=element.paper, radius=element.rect.width / 2)


_DRAW: dict[Kind, Callable[[Canvas, Element, Palette], None]] = {
    "app_icon": draw_app_icon,
    "title": draw_caption,
    "heading": draw_caption,
    "text": draw_text,
    "row": _draw_row,
    "switch_row": _draw_row,
    "choice_row": _draw_row,
    "slider": draw_slider,
    "button": draw_button,
    "field": draw_field,
    "key": draw_key,
    "round_button": draw_round_button,
    "photo": draw_photo,
    "bubble": draw_bubble,
    "art": draw_art,
    "panel": _draw_surface,
    "nav": draw_nav,
    "pill": draw_pill,
    "tile": draw_tile,
    "notification": draw_notification,
    "meter": draw_meter,
    "swatch": draw_swatch,
    "scrim": lambda canvas, element, palette: canvas.dim(element.rect),
    "card": _draw_surface,
    "card_title": draw_caption,
}
