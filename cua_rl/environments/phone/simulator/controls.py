"""Screen layout, and the rows, buttons and fields that screens are made of."""

from dataclasses import replace
from typing import TypedDict, Unpack

from cua_rl.environments.phone.simulator.catalog import (
    HEIGHT,
    SETTINGS,
    SWITCHES,
    WIDTH,
    Colour,
    Toggle,
    find_app,
    glyph_of,
)
from cua_rl.environments.phone.simulator.elements import (
    Do,
    Effect,
    Element,
    Enter,
    FocusField,
    Kind,
    Operate,
    Press,
    Push,
    Rect,
    Slide,
)
from cua_rl.environments.phone.simulator.navigation import field_value
from cua_rl.environments.phone.simulator.state import Field, PhoneState
from cua_rl.types.actions import Button

STATUS_HEIGHT = 16
CONTENT_TOP = 44
NAV_TOP = HEIGHT - 20
CONTENT_BOTTOM = NAV_TOP - 2
ROW_HEIGHT = 36
"""Seven rows fill the space between title and navigation bar."""
SLIDER_LEFT, SLIDER_RIGHT = 48, 176
"""Where a slider's track begins and ends."""


GREEN = "#2e9e4f"
RED = "#d32f2f"
BLUE = "#1f6fe5"

Box = tuple[int, int, int, int]
"""x, y, width, height in logical units."""


class Look(TypedDict, total=False):
    """Further fields of an `Element`."""

    effect: Effect | None
    detail: str
    glyph: str
    paper: Colour
    is_on: bool
    level: float


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

    def stack(self, element: Element) -> None:
        """Append an element at the bottom of the column, wherever it was placed."""
        self.add(replace(element, rect=replace(element.rect, y=self.y)))

    def pin(self, *elements: Element) -> None:
        """Add elements that do not scroll."""
        self._pinned.extend(elements)

    def add_heading(self, text: str) -> None:
        """A small heading above a group of rows."""
        self.add(place(f"heading:{text}", text, "heading", (14, self.y + 4, WIDTH - 28, 16), text=text))

    def add_text(self, text: str, *, indent: int = 14) -> None:
        self.add(place(f"text:{self.y}", text, "text", (indent, self.y + 6, WIDTH - 2 * indent, 14), text=text))


def title(text: str, *, y: int, height: int, indent: int = 12) -> Element:
    """The name of the screen, at its top."""
    return place("title", text, "title", (indent, y, WIDTH - indent - 12, height), text=text)


def back_arrow() -> Element:
    box = (2, STATUS_HEIGHT, 28, CONTENT_TOP - STATUS_HEIGHT)
    return place("arrow", "Up", "nav", box, effect=Press(button=Button.BACK), glyph="arrow")


def row(
    element_id: str,
    *,
    y: int = 0,
    text: str,
    label: str = "",
    ink: Colour = "#ffffff",
    kind: Kind = "row",
    height: int = ROW_HEIGHT,
    **look: Unpack[Look],
) -> Element:
    """A row over the full width, with an icon on the left if `glyph` is given; `label` is its text unless given."""
    return place(element_id, label or text, kind, (0, y, WIDTH, height), text=text, ink=ink, **look)


def place(
    element_id: str, label: str, kind: Kind, box: Box, *, text: str = "", ink: Colour = "", **look: Unpack[Look]
) -> Element:
    x, y, width, height = box
    rect = Rect(x=x, y=y, width=width, height=height)
    # pyrefly: ignore[open-unpacking] - `Look` has no further fields
    return Element(element_id=element_id, label=label, kind=kind, rect=rect, text=text, ink=ink, **look)


def text_field(state: PhoneState, field: Field, hint: str, box: Box) -> Element:
    """A text field; it shows `hint` while empty and unfocused. Its label is the hint's first word."""
    value, is_on = field_value(state, field), state.focus == field
    text, ink = value or ("" if is_on else hint), "" if value else "hint"
    label, effect = hint.split(maxsplit=1)[0], FocusField(field=field)
    return place(f"field:{field}", label, "field", box, effect=effect, text=text, is_on=is_on, ink=ink)


def add_field(column: Column, state: PhoneState, field: Field, hint: str) -> None:
    """A text field over the column's width."""
    column.y += 2
    column.add(text_field(state, field, hint, (12, column.y, WIDTH - 24, 26)))


def title_button(label: str, effect: Effect) -> Element:
    """A button at the right of the title, such as Save."""
    return place(label.lower(), label, "button", (140, 19, 44, 22), effect=effect, text=label)


def plus_button(subscreen: str) -> Element:
    """The round button at the bottom right that creates a new item."""
    effect = Push(subscreen=subscreen)
    return place("new", "New", "round_button", (146, 256, 36, 36), effect=effect, glyph="plus", paper=BLUE)


def wide_button(label: str, y: int, effect: Do | Push, *, text: str | None = None) -> Element:
    return place(label.lower(), label, "button", (28, y, WIDTH - 56, 24), effect=effect, text=text or label)


def button(text: str, box: Box, effect: Effect, *, label: str = "") -> Element:
    """A filled button; `label` is its text unless given."""
    return place(f"button:{text}", label or text, "button", box, effect=effect, text=text)


def pill(text: str, box: Box, effect: Effect | None) -> Element:
    """A plain button, greyed out without an effect."""
    return place(f"pill:{text}", text, "pill", box, effect=effect, text=text)


def switch_row(state: PhoneState, name: str, *, effect: Effect | None = None, detail: str = "") -> Element:
    """The row of one of the `SWITCHES`; flips it unless another effect is given."""
    return row(
        f"switch:{name}",
        text=SWITCHES[name],
        detail=detail,
        effect=effect or Operate(command="switch", target=name),
        kind="switch_row",
        is_on=name in state.system.switched_on,
    )


def toggle_row(
    state: PhoneState, toggle: Toggle, text: str, *, label: str, glyph: str = "", paper: Colour = ""
) -> Element:
    return row(
        f"toggle:{toggle.value}",
        label=label,
        text=text,
        glyph=glyph,
        paper=paper,
        effect=Operate(command="toggle", target=toggle.value),
        kind="switch_row",
        is_on=state.is_on(toggle),
    )


def page_row(
    subscreen: str, text: str, *, label: str = "", detail: str = "", glyph: str = "", paper: Colour = ""
) -> Element:
    effect = Push(subscreen=subscreen)
    return row(f"page:{subscreen}", label=label, text=text, detail=detail, glyph=glyph, paper=paper, effect=effect)


def person_row(
    element_id: str, name: str, detail: str, subscreen: str, *, paper: Colour = "#7a8494", height: int = ROW_HEIGHT
) -> Element:
    """The row of a person, or of what they sent; it opens a screen."""
    effect = Push(subscreen=subscreen)
    return row(element_id, text=name, detail=detail, glyph="person", paper=paper, effect=effect, height=height)


def add_keypad(column: Column, keys: str, *, top: int, num_columns: int, key_height: int) -> None:
    width = (WIDTH - 24) // num_columns
    for i, key in enumerate(keys):
        rect = (12 + i % num_columns * width + 2, top + i // num_columns * key_height + 2, width - 4, key_height - 4)
        column.add(place(f"key:{key}", key, "key", rect, effect=Enter(key=key), text=key))


def slider(label: str, level: float, effect: Slide, glyph: str, *, y: int = 0) -> Element:
    """A slider over the full width; `level` is 0-1."""
    box, paper = (0, y, WIDTH, 36), SETTINGS[glyph].paper
    name = f"slider:{effect.level}"
    return place(name, label, "slider", box, effect=effect, level=level, glyph=glyph, paper=paper, ink="#ffffff")


def navigation_bar() -> tuple[Element, ...]:
    """The system buttons below every screen."""
    third, height = WIDTH // 3, HEIGHT - NAV_TOP
    return tuple(
        place(
            f"nav:{button.value}",
            button.value.capitalize(),
            "nav",
            (i * third, NAV_TOP, third, height),
            effect=Press(button=button),
            glyph=button.value,
        )
        for i, button in enumerate((Button.BACK, Button.HOME, Button.RECENTS))
    )


def app_row(
    app: str, kind: str, *, y: int = 0, detail: str = "", effect: Effect | None = None, height: int = ROW_HEIGHT
) -> Element:
    """The row of an app, with its icon and its name."""
    spec = find_app(app)
    return row(
        f"{kind}:{app}",
        y=y,
        text=spec.label,
        detail=detail,
        glyph=glyph_of(app),
        paper=spec.paper,
        ink=spec.ink,
        effect=effect,
        height=height,
    )
