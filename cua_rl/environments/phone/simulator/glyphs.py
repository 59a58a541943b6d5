"""The line art of icons, drawn on a 24 x 24 grid."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi, sin

from PIL import ImageDraw

from cua_rl.environments.phone.simulator.catalog import Colour

Point = tuple[float, float]

INK, PAPER = "ink", "paper"
"""The colours of the icon; a mark may also have one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The square of 24 x 24 units on a picture."""

    draw: ImageDraw.ImageDraw
    left_px: float
    top_px: float
    size_px: float

    def px(self, units: float) -> float:
        return units * (self.size_px / 24)

    def at(self, point: Point) -> Point:
        return self.left_px + self.px(point[0]), self.top_px + self.px(point[1])

    def square(self, x: float, y: float, radius: float) -> list[Point]:
        """The corners of the square around a circle, in pixels."""
        return [self.at((x - radius, y - radius)), self.at((x + radius, y + radius))]

    def stroke_px(self, width: float) -> int:
        """How wide a line is, in pixels."""
        return max(1, round(self.px(width)))


@dataclass(frozen=True, slots=True)
class Line:
    """A line with round ends and joints."""

    points: tuple[Point, ...]
    width: float = 2.4
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        points = [grid.at(point) for point in self.points]
        grid.draw.line(points, fill=colour, width=grid.stroke_px(self.width), joint="curve")
        for x, y in self.points:
            grid.draw.ellipse(grid.square(x, y, self.width / 2), fill=colour)


@dataclass(frozen=True, slots=True)
class Disc:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        grid.draw.ellipse(grid.square(self.x, self.y, self.radius), fill=colour)


@dataclass(frozen=True, slots=True)
class Ring:
    """A circle's outline."""

    x: float
    y: float
    radius: float
    width: float = 2.4
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        corners = grid.square(self.x, self.y, self.radius)
        grid.draw.ellipse(corners, outline=colour, width=grid.stroke_px(self.width))


@dataclass(frozen=True, slots=True)
class Arc:
    """Part of a circle, clockwise from `start` to `end` degrees, 0 being three o'clock."""

    x: float
    y: float
    radius: float
    start: float
    end: float
    width: float = 2.4
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        corners = grid.square(self.x, self.y, self.radius)
        grid.draw.arc(corners, self.start, self.end, fill=colour, width=grid.stroke_px(self.width))


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled polygon."""

    points: tuple[Point, ...]
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        grid.draw.polygon([grid.at(point) for point in self.points], fill=colour)


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle with round corners."""

    left: float
    top: float
    right: float
    bottom: float
    radius: float = 0
    colour: Colour = INK

    def draw(self, grid: Grid, colour: Colour) -> None:
        corners = [grid.at((self.left, self.top)), grid.at((self.right, self.bottom))]
        grid.draw.rounded_rectangle(corners, radius=grid.px(self.radius), fill=colour)


Mark = Line | Disc | Ring | Arc | Polygon | Box


def draw_glyph(name: str, grid: Grid, *, ink: Colour, paper: Colour) -> None:
    """Draw the line art of a name; `paper` is the colour behind it."""
    for mark in GLYPHS[name]:
        mark.draw(grid, {INK: ink, PAPER: paper}.get(mark.colour, mark.colour))


def _rays(number: int, inner: float, outer: float, *, width: float) -> Iterator[Line]:
    """Lines away from the middle, evenly around it."""
    for i in range(number):
        dx, dy = cos(2 * pi * i / number), sin(2 * pi * i / number)
        yield Line(((12 + inner * dx, 12 + inner * dy), (12 + outer * dx, 12 + outer * dy)), width=width)


GLYPHS: dict[str, tuple[Mark, ...]] = {
    "settings": (*_rays(8, 6, 9.3, width=3.6), Disc(12, 12, 7.4), Disc(12, 12, 3.2, colour=PAPER)),
    "phone": (Line(((6, 6.5), (7.5, 11), (13, 16.5), (17.5, 18)), width=4), Disc(6.3, 6.3, 3.1), Disc(17.7, 17.7, 3.1)),
    "messages": (
        Box(3, 4, 21, 17, radius=4),
        Polygon(((6, 15), (6, 22), (13, 16))),
        *(Disc(x, 10.5, 1.5, colour=PAPER) for x in (8, 12, 16)),
    ),
    "mail": (Box(2.5, 5, 21.5, 19, radius=2), Line(((4, 7.5), (12, 13.5), (20, 7.5)), width=2, colour=PAPER)),
    "notes": (*(Line(((4, y), (right, y)), width=3) for y, right in ((6, 20), (12, 20), (18, 13))),),
    "clock": (Ring(12, 12, 10, width=2.6), Line(((12, 6), (12, 12), (16.5, 14.5)), width=2.4)),
    "camera": (
        Box(2, 7, 22, 20, radius=2.5),
        Box(8, 4, 16, 9, radius=1.5),
        Disc(12, 13.3, 4.6, colour=PAPER),
        Disc(12, 13.3, 2.2, colour="#4fc3f7"),
    ),
    "gallery": (
        Box(2.5, 4, 21.5, 20, radius=2),
        Disc(8, 9, 2.2, colour="#f7b500"),
        Polygon(((4, 18.5), (10, 12), (13, 15), (16, 11), (20.5, 18.5)), colour=PAPER),
    ),
    "calendar": (
        Box(3, 4, 21, 21, radius=2.5),
        Box(4.8, 9, 19.2, 19.3, radius=1, colour=PAPER),
        *(Box(x - 1.2, y - 1.2, x + 1.2, y + 1.2, colour="#3a3f4b") for x in (8, 12, 16) for y in (12, 16.3)),
        *(Line(((x, 2.5), (x, 5.5)), width=2) for x in (8, 16)),
    ),
    "maps": (
        Line(((-3, 20), (27, 14)), width=3.4, colour="#ffffff"),
        Line(((5, -3), (8, 27)), width=3.4, colour="#ffffff"),
        Disc(12, 9.3, 6.9),
        Polygon(((5.9, 12.4), (18.1, 12.4), (12, 22.5))),
        Disc(12, 9.3, 2.8, colour="#ffffff"),
    ),
    "music": (
        Line(((9, 17.5), (9, 5.5), (19, 3.5), (19, 15.5)), width=2.6),
        Line(((9, 8), (19, 6)), width=2.4),
        Disc(6.6, 18, 3.4),
        Disc(16.6, 16, 3.4),
    ),
    "files": (Box(2.5, 4.5, 12, 12, radius=2), Box(2.5, 7.5, 21.5, 19.5, radius=2)),
    "chrome": (
        Ring(12, 12, 10, width=2.2),
        Line(((2.5, 12), (21.5, 12)), width=2),
        Arc(3, 12, 14, -43, 43, width=2),
        Arc(21, 12, 14, 137, 223, width=2),
    ),
    "calculator": (
        Line(((3.5, 7), (10, 7)), width=2.6),
        Line(((6.75, 3.8), (6.75, 10.2)), width=2.6),
        Line(((14, 7), (20.5, 7)), width=2.6),
        Line(((4.3, 14.8), (9.3, 19.8)), width=2.6),
        Line(((9.3, 14.8), (4.3, 19.8)), width=2.6),
        *(Line(((14, y), (20.5, y)), width=2.4) for y in (15.5, 19.3)),
    ),
    "weather": (
        Disc(9, 9, 5.6),
        *(Disc(x, y, radius, colour="#ffffff") for x, y, radius in ((9, 16.5, 4.2), (14, 14.2, 5.2), (18.5, 17, 3.7))),
        Box(9, 16, 18.5, 20.7, colour="#ffffff"),
    ),
    "contacts": (Disc(12, 8, 4.8), Box(3.5, 14.5, 20.5, 26, radius=6), Box(2, 21.5, 22, 27, colour=PAPER)),
    "wifi": (*(Arc(12, 19, radius + 1.2, 225, 315, width=2.6) for radius in (5.5, 10, 14.5)), Disc(12, 18.8, 2)),
    "bluetooth": (Line(((6.5, 7), (17, 17), (12, 21.5), (12, 2.5), (17, 7), (6.5, 17)), width=2.2),),
    "airplane_mode": (
        Line(((12, 3.2), (12, 20.5)), width=3.2),
        Polygon(((12, 7.5), (22.5, 15), (22.5, 17.3), (12, 13.5), (1.5, 17.3), (1.5, 15))),
        Polygon(((12, 17), (16.5, 21), (16.5, 22.6), (12, 21), (7.5, 22.6), (7.5, 21))),
    ),
    "dark_theme": (Disc(11.5, 12.5, 8.8), Disc(15.8, 9, 7.6, colour=PAPER)),
    "battery_saver": (
        Box(9, 1.5, 15, 6, radius=1),
        Box(6, 4, 18, 22.5, radius=2),
        Line(((12, 9.5), (12, 17.5)), width=2.2, colour=PAPER),
        Line(((8.6, 13.5), (15.4, 13.5)), width=2.2, colour=PAPER),
    ),
    "battery": (Box(9, 1.5, 15, 6, radius=1), Box(6, 4, 18, 22.5, radius=2)),
    "location": (
        Disc(12, 9.3, 6.9),
        Polygon(((5.9, 12.4), (18.1, 12.4), (12, 22.5))),
        Disc(12, 9.3, 2.8, colour=PAPER),
    ),
    "do_not_disturb": (Disc(12, 12, 10), Line(((7.5, 12), (16.5, 12)), width=3.2, colour=PAPER)),
    "auto_rotate": (
        Arc(12, 12, 9.6, 20, 160, width=2.8),
        Arc(12, 12, 9.6, 200, 340, width=2.8),
        Polygon(((16.5, 9.8), (24, 9.8), (21.8, 3.4))),
        Polygon(((7.5, 14.2), (0, 14.2), (2.2, 20.6))),
    ),
    "display": (*_rays(8, 7.8, 10, width=2.2), Disc(12, 12, 5)),
    "sound": (
        Polygon(((2.5, 9), (7, 9), (13, 4), (13, 20), (7, 15), (2.5, 15))),
        *(Arc(12, 12, radius, -48, 48, width=2.2) for radius in (5, 9.5)),
    ),
    "about": (Disc(12, 5, 2.4), Line(((12, 11), (12, 20.5)), width=4)),
    "plus": (Line(((12, 4.5), (12, 19.5)), width=2.8), Line(((4.5, 12), (19.5, 12)), width=2.8)),
    "play": (Polygon(((7, 4), (20, 12), (7, 20))),),
    "pause": (Box(6, 4.5, 10.2, 19.5), Box(13.8, 4.5, 18, 19.5)),
    "shutter": (Ring(12, 12, 13, width=2, colour="#6a7079"),),
    "back": (Polygon(((17, 4.5), (17, 19.5), (5, 12))),),
    "home": (Ring(12, 12, 8, width=2.6),),
    "recents": (Box(4.5, 4.5, 19.5, 19.5, radius=2), Box(7, 7, 17, 17, colour=PAPER)),
    "arrow": (Line(((20, 12), (5, 12)), width=2.4), Line(((11, 5.5), (4.5, 12), (11, 18.5)), width=2.4)),
    "search": (Ring(10, 10, 7.5, width=2.6), Line(((15.5, 15.5), (21, 21)), width=2.8)),
    "document": (
        Polygon(((5, 2.5), (14.5, 2.5), (19, 7), (19, 21.5), (5, 21.5))),
        *(Line(((8, y), (16, y)), width=1.6, colour=PAPER) for y in (10.5, 14, 17.5)),
    ),
    "bin": (
        Box(4, 5, 20, 7.5, radius=1),
        Box(9, 2.5, 15, 6, radius=1),
        Box(5.5, 8.5, 18.5, 22, radius=2),
        *(Line(((x, 11.5), (x, 19)), width=1.6, colour=PAPER) for x in (9.5, 14.5)),
    ),
    "apps": (*(Box(x, y, x + 5, y + 5, radius=1.2) for x in (3, 9.5, 16) for y in (3, 9.5, 16)),),
    "storage": (
        *(Box(2.5, y, 21.5, y + 5, radius=1) for y in (3, 10, 17)),
        *(Disc(6, y + 2.5, 1.2, colour=PAPER) for y in (3, 10, 17)),
    ),
    "lock": (
        Arc(12, 9, 5.5, 180, 360, width=2.6),
        Line(((6.8, 9), (6.8, 12)), width=2.4),
        Line(((17.2, 9), (17.2, 12)), width=2.4),
        Box(4, 11, 20, 21.5, radius=2),
        Disc(12, 16, 1.9, colour=PAPER),
    ),
    "globe": (
        Ring(12, 12, 10, width=2.2),
        Line(((2.5, 12), (21.5, 12)), width=2),
        Arc(22.5, 12, 14.5, 136, 224, width=1.8),
        Arc(1.5, 12, 14.5, 316, 44, width=1.8),
    ),
    "braces": (
        Line(((9, 4), (6.5, 5), (6.5, 10), (4, 12), (6.5, 14), (6.5, 19), (9, 20)), width=2.2),
        Line(((15, 4), (17.5, 5), (17.5, 10), (20, 12), (17.5, 14), (17.5, 19), (15, 20)), width=2.2),
    ),
    "sun_rays": (*_rays(6, 0, 9, width=2.6),),
    "rails": (
        Line(((8, 2.5), (4, 21.5)), width=2.2),
        Line(((16, 2.5), (20, 21.5)), width=2.2),
        *(Line(((12 - half, y), (12 + half, y)), width=2) for y, half in ((7, 5), (12, 6.5), (17, 8))),
    ),
}
GLYPHS["person"] = GLYPHS["contacts"]
GLYPHS["date"] = GLYPHS["clock"]
