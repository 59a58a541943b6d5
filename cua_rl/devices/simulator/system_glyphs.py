"""The line art of system pages, drawn on a 24 x 24 grid."""

from collections.abc import Callable
from math import cos, pi, sin

from cua_rl.devices.simulator.catalog import Colour
from cua_rl.devices.simulator.glyphs import Pen


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


SYSTEM_GLYPHS: dict[str, Callable[[Pen, Colour, Colour], None]] = {
    "apps": _apps,
    "storage": _storage,
    "lock": _lock,
    "globe": _globe,
    "braces": _braces,
    "sun_rays": _sun_rays,
    "rails": _rails,
}
