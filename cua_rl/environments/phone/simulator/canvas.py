"""Drawing in logical units on a picture of any scale; shapes are drawn large once, shrunk, and kept."""

from functools import lru_cache

from PIL import Image, ImageChops, ImageDraw, ImageFont

from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH, Colour
from cua_rl.environments.phone.simulator.elements import Rect
from cua_rl.environments.phone.simulator.glyphs import Grid, draw_glyph

_OVERSAMPLING = 4
_CLEAR = (0, 0, 0, 0)


class Canvas:
    """A picture of the phone's screen; all coordinates and sizes are logical units."""

    def __init__(self, scale: int, background: Colour) -> None:
        self.scale = scale
        self.image = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), background)
        self._draw = ImageDraw.Draw(self.image)

    def fill(self, rect: Rect, colour: Colour) -> None:
        self._draw.rectangle(_box_px(rect, self.scale, inclusive=True), fill=colour)

    def rounded(self, rect: Rect, colour: Colour, *, radius: float) -> None:
        left, top, right, bottom = _box_px(rect, self.scale)
        mask = _rounded_mask(right - left, bottom - top, round(radius * self.scale))
        self.image.paste(colour, (left, top), mask)

    def glyph(self, name: str, rect: Rect, *, ink: Colour, paper: Colour) -> None:
        """Line art that fills a square; `paper` is the colour behind it."""
        left, top, right, _ = _box_px(rect, self.scale)
        picture = _glyph(name, right - left, ink, paper)
        self.image.paste(picture, (left, top), picture)

    def icon(self, name: str, rect: Rect, *, ink: Colour, paper: Colour, radius: float) -> None:
        """A rounded square of `paper` with a glyph on it."""
        left, top, right, _ = _box_px(rect, self.scale)
        picture = _icon(name, right - left, ink, paper, radius / rect.width)
        self.image.paste(picture, (left, top), picture)

    def gradient(self, rect: Rect, top_colour: Colour, bottom_colour: Colour) -> None:
        left, top, right, bottom = _box_px(rect, self.scale)
        self.image.paste(_gradient(right - left, bottom - top, top_colour, bottom_colour), (left, top))

    def dim(self, rect: Rect) -> None:
        """Darken what was drawn in a rectangle by half."""
        box = _box_px(rect, self.scale)
        part = self.image.crop(box)
        self.image.paste(Image.blend(part, Image.new("RGB", part.size), 0.5), box)

    def line(self, points: tuple[tuple[float, float], ...], colour: Colour, *, width: float) -> None:
        scaled = [(x * self.scale, y * self.scale) for x, y in points]
        self._draw.line(scaled, fill=colour, width=max(1, round(width * self.scale)), joint="curve")

    def text(
        self, x: float, y: float, text: str, colour: Colour, *, size: int, anchor: str = "lm", max_width: int = WIDTH
    ) -> None:
        """One line of text, cut to `max_width`; `anchor` as Pillow has it."""
        text = _fit(text, size * self.scale, max_width * self.scale)
        if text:
            mask, left, top = _text_mask(text, size * self.scale, anchor)
            self.image.paste(colour, (round(x * self.scale) + left, round(y * self.scale) + top), mask)

    def keep_inside(self, rect: Rect, before: Image.Image) -> None:
        """Undo what was drawn outside `rect` since `before`."""
        box = _box_px(rect, self.scale)
        kept = self.image.crop(box)
        self.image.paste(before, (0, 0))
        self.image.paste(kept, (box[0], box[1]))


def text_width(text: str, size: int) -> float:
    # Measured large, because small sizes are rounded to whole pixels.
    return _font(size * 8).getlength(text) / 8


def _box_px(rect: Rect, scale: int, *, inclusive: bool = False) -> tuple[int, int, int, int]:
    last = 1 if inclusive else 0
    return rect.x * scale, rect.y * scale, rect.right * scale - last, rect.bottom * scale - last


@lru_cache(maxsize=64)
def _font(size_px: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size_px)
    assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow was built with FreeType, as all wheels are
    return font


@lru_cache(maxsize=2048)
def _fit(text: str, size_px: int, max_width_px: int) -> str:
    font = _font(size_px)
    if font.getlength(text) <= max_width_px:
        return text
    while text and font.getlength(text + "...") > max_width_px:
        text = text[:-1]
    return text.rstrip() + "..."


@lru_cache(maxsize=2048)
def _text_mask(text: str, size_px: int, anchor: str) -> tuple[Image.Image, int, int]:
    """The letters, and where their left upper corner lies from the anchor."""
    left, top, right, bottom = (int(edge) for edge in _font(size_px).getbbox(text, anchor=anchor))
    mask = Image.new("L", (right - left, bottom - top), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=_font(size_px), anchor=anchor)
    return mask, left, top


@lru_cache(maxsize=512)
def _rounded_mask(width_px: int, height_px: int, radius_px: int) -> Image.Image:
    large = Image.new("L", (width_px * _OVERSAMPLING, height_px * _OVERSAMPLING), 0)
    corners = (0, 0, large.width - 1, large.height - 1)
    ImageDraw.Draw(large).rounded_rectangle(corners, radius=radius_px * _OVERSAMPLING, fill=255)
    return large.resize((width_px, height_px), Image.Resampling.BOX)


@lru_cache(maxsize=512)
def _glyph(name: str, size_px: int, ink: Colour, paper: Colour) -> Image.Image:
    size = size_px * _OVERSAMPLING
    large = Image.new("RGBA", (size, size), _CLEAR)
    draw_glyph(name, Grid(draw=ImageDraw.Draw(large), left_px=0, top_px=0, size_px=size), ink=ink, paper=paper)
    return large.resize((size_px, size_px), Image.Resampling.BOX)


@lru_cache(maxsize=512)
def _icon(name: str, size_px: int, ink: Colour, paper: Colour, relative_radius: float) -> Image.Image:
    size = size_px * _OVERSAMPLING
    large = Image.new("RGBA", (size, size), paper)
    margin = size * 0.16
    grid = Grid(draw=ImageDraw.Draw(large), left_px=margin, top_px=margin, size_px=size - 2 * margin)
    draw_glyph(name, grid, ink=ink, paper=paper)
    mask = Image.new("L", (size, size), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, size - 1, size - 1), radius=relative_radius * size, fill=255)
    large.putalpha(ImageChops.multiply(mask, large.getchannel("A")))
    return large.resize((size_px, size_px), Image.Resampling.BOX)


@lru_cache(maxsize=32)
def _gradient(width_px: int, height_px: int, top_colour: Colour, bottom_colour: Colour) -> Image.Image:
    ramp = Image.linear_gradient("L").resize((width_px, height_px))
    bottom = Image.new("RGB", (width_px, height_px), bottom_colour)
    return Image.composite(bottom, Image.new("RGB", (width_px, height_px), top_colour), ramp)
