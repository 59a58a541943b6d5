"""The line art of icons, drawn on a 24 x 24 grid."""

from collections.abc import Callable
from math import cos, pi, sin

from PIL import ImageDraw

from cua_rl.devices.simulator.catalog import Colour

Point = tuple[float, float]


class Pen:
    """Draws on a square of 24 x 24 units."""

    def __init__(self, draw: ImageDraw.ImageDraw, *, left_px: float, top_px: float, size_px: float) -> None:
        self._draw = draw
        self._left_px = left_px
        self._top_px = top_px
        self._unit_px = size_px / 24

    def _at(self, point: Point) -> Point:
        return self._left_px + point[0] * self._unit_px, self._top_px + point[1] * self._unit_px

    def line(self, *points: Point, colour: Colour, width: float = 2.4) -> None:
        """A line with round ends and joints."""
        width_px = max(1, round(width * self._unit_px))
        self._draw.line([self._at(point) for point in points], fill=colour, width=width_px, joint="curve")
        for x, y in points:
            self.disc(x, y, width / 2, colour=colour)

    def disc(self, x: float, y: float, radius: float, *, colour: Colour) -> None:
        """A filled circle."""
        corners = [self._at((x - radius, y - radius)), self._at((x + radius, y + radius))]
        self._draw.ellipse(corners, fill=colour)

    def ring(self, x: float, y: float, radius: float, *, colour: Colour, width: float = 2.4) -> None:
        """A circle's outline."""
        corners = [self._at((x - radius, y - radius)), self._at((x + radius, y + radius))]
        self._draw.ellipse(corners, outline=colour, width=max(1, round(width * self._unit_px)))

    def arc(
        self, x: float, y: float, radius: float, start: float, end: float, *, colour: Colour, width: float = 2.4
    ) -> None:
        """Part of a circle, clockwise from `start` to `end` degrees, 0 being three o'clock."""
        corners = [self._at((x - radius, y - radius)), self._at((x + radius, y + radius))]
        self._draw.arc(corners, start, end, fill=colour, width=max(1, round(width * self._unit_px)))

    def shape(self, *points: Point, colour: Colour) -> None:
        """A filled polygon."""
        self._draw.polygon([self._at(point) for point in points], fill=colour)

    def box(self, left: float, top: float, right: float, bottom: float, *, colour: Colour, radius: float = 0) -> None:
        """A filled rectangle with round corners."""
        corners = [self._at((left, top)), self._at((right, bottom))]
        self._draw.rounded_rectangle(corners, radius=radius * self._unit_px, fill=colour)


def _settings(pen: Pen, ink: Colour, paper: Colour) -> None:
    for i in range(8):
        angle = i * pi / 4
        dx, dy = cos(angle), sin(angle)
        pen.line((12 + 6 * dx, 12 + 6 * dy), (12 + 9.3 * dx, 12 + 9.3 * dy), colour=ink, width=3.6)
    pen.disc(12, 12, 7.4, colour=ink)
    pen.disc(12, 12, 3.2, colour=paper)


def _phone(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((6, 6.5), (7.5, 11), (13, 16.5), (17.5, 18), colour=ink, width=4)
    pen.disc(6.3, 6.3, 3.1, colour=ink)
    pen.disc(17.7, 17.7, 3.1, colour=ink)


def _messages(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(3, 4, 21, 17, colour=ink, radius=4)
    pen.shape((6, 15), (6, 22), (13, 16), colour=ink)
    for x in (8, 12, 16):
        pen.disc(x, 10.5, 1.5, colour=paper)


def _mail(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(2.5, 5, 21.5, 19, colour=ink, radius=2)
    pen.line((4, 7.5), (12, 13.5), (20, 7.5), colour=paper, width=2)


def _notes(pen: Pen, ink: Colour, paper: Colour) -> None:
    for y, right in ((6, 20), (12, 20), (18, 13)):
        pen.line((4, y), (right, y), colour=ink, width=3)


def _clock(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(12, 12, 10, colour=ink, width=2.6)
    pen.line((12, 6), (12, 12), (16.5, 14.5), colour=ink, width=2.4)


def _camera(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(2, 7, 22, 20, colour=ink, radius=2.5)
    pen.box(8, 4, 16, 9, colour=ink, radius=1.5)
    pen.disc(12, 13.3, 4.6, colour=paper)
    pen.disc(12, 13.3, 2.2, colour="#4fc3f7")


def _gallery(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(2.5, 4, 21.5, 20, colour=ink, radius=2)
    pen.disc(8, 9, 2.2, colour="#f7b500")
    pen.shape((4, 18.5), (10, 12), (13, 15), (16, 11), (20.5, 18.5), colour=paper)


def _calendar(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(3, 4, 21, 21, colour=ink, radius=2.5)
    pen.box(4.8, 9, 19.2, 19.3, colour=paper, radius=1)
    for x in (8, 12, 16):
        for y in (12, 16.3):
            pen.box(x - 1.2, y - 1.2, x + 1.2, y + 1.2, colour="#3a3f4b")
    for x in (8, 16):
        pen.line((x, 2.5), (x, 5.5), colour=ink, width=2)


def _maps(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((-3, 20), (27, 14), colour="#ffffff", width=3.4)
    pen.line((5, -3), (8, 27), colour="#ffffff", width=3.4)
    _location(pen, ink, "#ffffff")


def _music(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((9, 17.5), (9, 5.5), (19, 3.5), (19, 15.5), colour=ink, width=2.6)
    pen.line((9, 8), (19, 6), colour=ink, width=2.4)
    pen.disc(6.6, 18, 3.4, colour=ink)
    pen.disc(16.6, 16, 3.4, colour=ink)


def _files(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(2.5, 4.5, 12, 12, colour=ink, radius=2)
    pen.box(2.5, 7.5, 21.5, 19.5, colour=ink, radius=2)


def _chrome(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(12, 12, 10, colour=ink, width=2.2)
    pen.line((2.5, 12), (21.5, 12), colour=ink, width=2)
    pen.arc(3, 12, 14, -43, 43, colour=ink, width=2)
    pen.arc(21, 12, 14, 137, 223, colour=ink, width=2)


def _calculator(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((3.5, 7), (10, 7), colour=ink, width=2.6)
    pen.line((6.75, 3.8), (6.75, 10.2), colour=ink, width=2.6)
    pen.line((14, 7), (20.5, 7), colour=ink, width=2.6)
    pen.line((4.3, 14.8), (9.3, 19.8), colour=ink, width=2.6)
    pen.line((9.3, 14.8), (4.3, 19.8), colour=ink, width=2.6)
    for y in (15.5, 19.3):
        pen.line((14, y), (20.5, y), colour=ink, width=2.4)


def _weather(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(9, 9, 5.6, colour=ink)
    for x, y, radius in ((9, 16.5, 4.2), (14, 14.2, 5.2), (18.5, 17, 3.7)):
        pen.disc(x, y, radius, colour="#ffffff")
    pen.box(9, 16, 18.5, 20.7, colour="#ffffff")


def _contacts(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(12, 8, 4.8, colour=ink)
    pen.box(3.5, 14.5, 20.5, 26, colour=ink, radius=6)
    pen.box(2, 21.5, 22, 27, colour=paper)


def _wifi(pen: Pen, ink: Colour, paper: Colour) -> None:
    for radius in (5.5, 10, 14.5):
        pen.arc(12, 19, radius + 1.2, 225, 315, colour=ink, width=2.6)
    pen.disc(12, 18.8, 2, colour=ink)


def _bluetooth(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((6.5, 7), (17, 17), (12, 21.5), (12, 2.5), (17, 7), (6.5, 17), colour=ink, width=2.2)


def _airplane(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((12, 3.2), (12, 20.5), colour=ink, width=3.2)
    pen.shape((12, 7.5), (22.5, 15), (22.5, 17.3), (12, 13.5), (1.5, 17.3), (1.5, 15), colour=ink)
    pen.shape((12, 17), (16.5, 21), (16.5, 22.6), (12, 21), (7.5, 22.6), (7.5, 21), colour=ink)


def _moon(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(11.5, 12.5, 8.8, colour=ink)
    pen.disc(15.8, 9, 7.6, colour=paper)


def _battery(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(9, 1.5, 15, 6, colour=ink, radius=1)
    pen.box(6, 4, 18, 22.5, colour=ink, radius=2)
    pen.line((12, 9.5), (12, 17.5), colour=paper, width=2.2)
    pen.line((8.6, 13.5), (15.4, 13.5), colour=paper, width=2.2)


def _plain_battery(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(9, 1.5, 15, 6, colour=ink, radius=1)
    pen.box(6, 4, 18, 22.5, colour=ink, radius=2)


def _location(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(12, 9.3, 6.9, colour=ink)
    pen.shape((5.9, 12.4), (18.1, 12.4), (12, 22.5), colour=ink)
    pen.disc(12, 9.3, 2.8, colour=paper)


def _no_entry(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(12, 12, 10, colour=ink)
    pen.line((7.5, 12), (16.5, 12), colour=paper, width=3.2)


def _rotate(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.arc(12, 12, 9.6, 20, 160, colour=ink, width=2.8)
    pen.arc(12, 12, 9.6, 200, 340, colour=ink, width=2.8)
    pen.shape((16.5, 9.8), (24, 9.8), (21.8, 3.4), colour=ink)
    pen.shape((7.5, 14.2), (0, 14.2), (2.2, 20.6), colour=ink)


def _sun(pen: Pen, ink: Colour, paper: Colour) -> None:
    for i in range(8):
        dx, dy = cos(i * pi / 4), sin(i * pi / 4)
        pen.line((12 + 7.8 * dx, 12 + 7.8 * dy), (12 + 10 * dx, 12 + 10 * dy), colour=ink, width=2.2)
    pen.disc(12, 12, 5, colour=ink)


def _sound(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.shape((2.5, 9), (7, 9), (13, 4), (13, 20), (7, 15), (2.5, 15), colour=ink)
    for radius in (5, 9.5):
        pen.arc(12, 12, radius, -48, 48, colour=ink, width=2.2)


def _about(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.disc(12, 5, 2.4, colour=ink)
    pen.line((12, 11), (12, 20.5), colour=ink, width=4)


def _plus(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((12, 4.5), (12, 19.5), colour=ink, width=2.8)
    pen.line((4.5, 12), (19.5, 12), colour=ink, width=2.8)


def _play(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.shape((7, 4), (20, 12), (7, 20), colour=ink)


def _pause(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(6, 4.5, 10.2, 19.5, colour=ink)
    pen.box(13.8, 4.5, 18, 19.5, colour=ink)


def _shutter(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(12, 12, 13, colour="#6a7079", width=2)


def _back(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.shape((17, 4.5), (17, 19.5), (5, 12), colour=ink)


def _home(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(12, 12, 8, colour=ink, width=2.6)


def _recents(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(4.5, 4.5, 19.5, 19.5, colour=ink, radius=2)
    pen.box(7, 7, 17, 17, colour=paper)


def _arrow(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((20, 12), (5, 12), colour=ink, width=2.4)
    pen.line((11, 5.5), (4.5, 12), (11, 18.5), colour=ink, width=2.4)


def _search(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(10, 10, 7.5, colour=ink, width=2.6)
    pen.line((15.5, 15.5), (21, 21), colour=ink, width=2.8)


def _document(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.shape((5, 2.5), (14.5, 2.5), (19, 7), (19, 21.5), (5, 21.5), colour=ink)
    for y in (10.5, 14, 17.5):
        pen.line((8, y), (16, y), colour=paper, width=1.6)


def _bin(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.box(4, 5, 20, 7.5, colour=ink, radius=1)
    pen.box(9, 2.5, 15, 6, colour=ink, radius=1)
    pen.box(5.5, 8.5, 18.5, 22, colour=ink, radius=2)
    for x in (9.5, 14.5):
        pen.line((x, 11.5), (x, 19), colour=paper, width=1.6)


def _apps(pen: Pen, ink: Colour, paper: Colour) -> None:
    for x in (3, 9.5, 16):
        for y in (3, 9.5, 16):
            pen.box(x, y, x + 5, y + 5, colour=ink, radius=1.2)


def _storage(pen: Pen, ink: Colour, paper: Colour) -> None:
    for y in (3, 10, 17):
        pen.box(2.5, y, 21.5, y + 5, colour=ink, radius=1)
        pen.disc(6, y + 2.5, 1.2, colour=paper)


def _lock(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.arc(12, 9, 5.5, 180, 360, colour=ink, width=2.6)
    pen.line((6.8, 9), (6.8, 12), colour=ink, width=2.4)
    pen.line((17.2, 9), (17.2, 12), colour=ink, width=2.4)
    pen.box(4, 11, 20, 21.5, colour=ink, radius=2)
    pen.disc(12, 16, 1.9, colour=paper)


def _globe(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.ring(12, 12, 10, colour=ink, width=2.2)
    pen.line((2.5, 12), (21.5, 12), colour=ink, width=2)
    pen.arc(22.5, 12, 14.5, 136, 224, colour=ink, width=1.8)
    pen.arc(1.5, 12, 14.5, 316, 44, colour=ink, width=1.8)


def _braces(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((9, 4), (6.5, 5), (6.5, 10), (4, 12), (6.5, 14), (6.5, 19), (9, 20), colour=ink, width=2.2)
    pen.line((15, 4), (17.5, 5), (17.5, 10), (20, 12), (17.5, 14), (17.5, 19), (15, 20), colour=ink, width=2.2)


def _sun_rays(pen: Pen, ink: Colour, paper: Colour) -> None:
    for i in range(6):
        angle = i * pi / 3
        pen.line((12, 12), (12 + 9 * cos(angle), 12 + 9 * sin(angle)), colour=ink, width=2.6)


def _rails(pen: Pen, ink: Colour, paper: Colour) -> None:
    pen.line((8, 2.5), (4, 21.5), colour=ink, width=2.2)
    pen.line((16, 2.5), (20, 21.5), colour=ink, width=2.2)
    for y, half in ((7, 5), (12, 6.5), (17, 8)):
        pen.line((12 - half, y), (12 + half, y), colour=ink, width=2)


GLYPHS: dict[str, Callable[[Pen, Colour, Colour], None]] = {
    "settings": _settings,
    "phone": _phone,
    "messages": _messages,
    "mail": _mail,
    "notes": _notes,
    "clock": _clock,
    "camera": _camera,
    "gallery": _gallery,
    "calendar": _calendar,
    "maps": _maps,
    "music": _music,
    "files": _files,
    "chrome": _chrome,
    "calculator": _calculator,
    "weather": _weather,
    "contacts": _contacts,
    "person": _contacts,
    "wifi": _wifi,
    "bluetooth": _bluetooth,
    "airplane_mode": _airplane,
    "dark_theme": _moon,
    "battery_saver": _battery,
    "battery": _plain_battery,
    "location": _location,
    "do_not_disturb": _no_entry,
    "auto_rotate": _rotate,
    "display": _sun,
    "sound": _sound,
    "date": _clock,
    "about": _about,
    "plus": _plus,
    "play": _play,
    "pause": _pause,
    "shutter": _shutter,
    "back": _back,
    "home": _home,
    "recents": _recents,
    "arrow": _arrow,
    "search": _search,
    "document": _document,
    "bin": _bin,
    "apps": _apps,
    "storage": _storage,
    "lock": _lock,
    "globe": _globe,
    "braces": _braces,
    "sun_rays": _sun_rays,
    "rails": _rails,
}
