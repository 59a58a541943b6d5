"""Pictures inside apps: the map, the viewfinder, photos, the month, the sky."""

from random import Random

from cua_rl.environments.phone.simulator.canvas import Canvas
from cua_rl.environments.phone.simulator.catalog import APPS, WALLPAPERS, Palette
from cua_rl.environments.phone.simulator.elements import Element, Rect

_SKIES = (("#8ec5fc", "#e0f0ff"), ("#f7a072", "#f5d0a9"), ("#5b6fb8", "#b0a4d8"), ("#74c69d", "#d8f3dc"))
_HILLS = ("#2d6a4f", "#52734d", "#5c4d7d", "#7f5539", "#33658a")


def draw_art(canvas: Canvas, element: Element, palette: Palette) -> None:
    """Draw the picture that `element.glyph` names."""
    match element.glyph:
        case "viewfinder":
            draw_viewfinder(canvas, element.rect)
        case "map":
            draw_map(canvas, element.rect, int(element.text))
        case "month":
            draw_month(canvas, element.rect, int(element.text), palette)
        case "portrait":
            canvas.icon("person", element.rect, ink="#ffffff", paper=element.paper, radius=element.rect.width / 2)
        case "document":
            draw_document(canvas, element)
        case "banner":
            draw_banner(canvas, element)
        case "wallpaper":
            canvas.gradient(element.rect, *WALLPAPERS[int(element.text)])
        case _:
            draw_sky(canvas, element)


def draw_photo(canvas: Canvas, element: Element, palette: Palette) -> None:
    """A small landscape, different for every photo."""
    if element.text.startswith("screen:"):
        draw_screenshot(canvas, element)
        return
    random = Random(element.text)
    rect = element.rect
    canvas.gradient(rect, *random.choice(_SKIES))
    sun_x = rect.x + random.randrange(8, rect.width - 16)
    canvas.rounded(Rect(x=sun_x, y=rect.y + 7, width=10, height=10), "#fff3b0", radius=5)
    horizon = rect.y + rect.height - random.randrange(14, 28)
    canvas.fill(Rect(x=rect.x, y=horizon, width=rect.width, height=rect.bottom - horizon), random.choice(_HILLS))


def draw_screenshot(canvas: Canvas, element: Element) -> None:
    """A small screenshot: the icon of the app that it shows."""
    rect = element.rect
    app = element.text.removeprefix("screen:").partition("/")[0]
    canvas.rounded(rect, "#8b93a3", radius=4)
    canvas.rounded(rect.inset(1), "#f3f4f7" if app in APPS else "#2a2d38", radius=4)
    size = rect.width // 2
    icon = Rect(x=rect.centre[0] - size // 2, y=rect.centre[1] - size // 2, width=size, height=size)
    spec = APPS.get(app, APPS["settings"])
    canvas.icon(app if app in APPS else "home", icon, ink=spec.ink, paper=spec.paper, radius=size / 4)


def draw_document(canvas: Canvas, element: Element) -> None:
    """A sheet with the kind of the file on it."""
    rect = element.rect
    canvas.rounded(rect, "#c9ced8", radius=5)
    canvas.rounded(rect.inset(1), "#ffffff", radius=4)
    for i in range(4):
        line = Rect(x=rect.x + 10, y=rect.y + 12 + 9 * i, width=rect.width - (20 if i < 3 else 34), height=3)
        canvas.rounded(line, "#d5dae3", radius=1)
    canvas.rounded(Rect(x=rect.x, y=rect.bottom - 24, width=rect.width, height=16), "#1f6fe5", radius=3)
    canvas.text(rect.centre[0], rect.bottom - 16, element.text, "#ffffff", size=10, anchor="mm")


def draw_banner(canvas: Canvas, element: Element) -> None:
    """The picture at the top of a page, different for every title."""
    random = Random(f"banner-{element.text}")
    rect = element.rect
    canvas.gradient(rect, *random.choice(_SKIES))
    for _ in range(3):
        size = random.randrange(10, 24)
        x, y = rect.x + random.randrange(80, rect.width - size), rect.y + random.randrange(4, rect.height - size - 4)
        canvas.rounded(Rect(x=x, y=y, width=size, height=size), random.choice(_HILLS), radius=size / 2)
    canvas.text(rect.x + 10, rect.centre[1], element.text, "#10223a", size=15, max_width=90)


def draw_viewfinder(canvas: Canvas, rect: Rect) -> None:
    canvas.gradient(rect, "#7fb2d9", "#d9e8f2")
    ground = Rect(x=rect.x, y=rect.y + 130, width=rect.width, height=rect.height - 130)
    canvas.fill(ground, "#5d8a66")
    canvas.rounded(Rect(x=60, y=rect.y + 84, width=72, height=70), "#b5654a", radius=3)
    canvas.rounded(Rect(x=88, y=rect.y + 116, width=18, height=38), "#5b3a29", radius=2)
    for i in (1, 2):
        x, y = rect.width * i / 3, rect.y + rect.height * i / 3
        canvas.line(((x, rect.y), (x, rect.bottom)), "#ffffff", width=0.5)
        canvas.line(((0, y), (rect.width, y)), "#ffffff", width=0.5)


def draw_map(canvas: Canvas, rect: Rect, seed: int) -> None:
    """A map, different for every seed."""
    random = Random(f"map-{seed}")
    canvas.fill(rect, "#e8efe0")
    canvas.rounded(
        Rect(x=random.randrange(20, 110), y=rect.y + random.randrange(20, 150), width=60, height=70),
        "#b9e6a3",
        radius=12,
    )
    river = tuple((x, rect.y + 40 + 0.7 * x + random.randrange(-8, 9)) for x in range(0, 193, 24))
    canvas.line(river, "#9fd0f2", width=12)
    for _ in range(4):
        y = rect.y + random.randrange(10, rect.height - 10)
        canvas.line(((0, y), (rect.width, y + random.randrange(-30, 30))), "#ffffff", width=5)
        x = random.randrange(10, rect.width - 10)
        canvas.line(((x, rect.y), (x + random.randrange(-40, 40), rect.bottom)), "#ffffff", width=5)
    pin = Rect(x=84, y=rect.y + 108, width=26, height=26)
    canvas.glyph("location", pin, ink="#d32f2f", paper="#ffffff")


def draw_month(canvas: Canvas, rect: Rect, seed: int, palette: Palette) -> None:
    """The days of a month, with today marked."""
    random = Random(f"month-{seed}")
    first_weekday, today = random.randrange(7), random.randrange(1, 31)
    width, height = rect.width // 7, 25
    for i, name in enumerate("MTWTFSS"):
        canvas.text(rect.x + i * width + width / 2, rect.y + 12, name, palette.muted, size=9, anchor="mm")
    for day in range(1, 31):
        week, weekday = divmod(day - 1 + first_weekday, 7)
        x, y = rect.x + weekday * width + width // 2, rect.y + 34 + week * height
        if day == today:
            canvas.rounded(Rect(x=x - 10, y=y - 11, width=20, height=20), palette.accent, radius=10)
        canvas.text(x, y, str(day), palette.on_accent if day == today else palette.text, size=10, anchor="mm")


def draw_sky(canvas: Canvas, element: Element) -> None:
    """Today's weather in large letters."""
    degrees, sky = element.text.split("|")
    rect = element.rect
    canvas.gradient(rect, "#4a90d9", "#9ad4f7")
    canvas.text(20, rect.y + 36, degrees, "#ffffff", size=34)
    canvas.text(20, rect.y + 66, sky, "#ffffff", size=12)
    canvas.glyph("weather", Rect(x=120, y=rect.y + 18, width=50, height=50), ink="#ffd54f", paper="#6aaee6")
