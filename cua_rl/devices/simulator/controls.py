"""Screen layout, and the rows, buttons and fields that screens are made of."""

from dataclasses import replace

from cua_rl.actions import Button
from cua_rl.devices.simulator.catalog import HEIGHT, SETTINGS, SWITCHES, WIDTH, Colour, find_app, glyph_of
from cua_rl.devices.simulator.elements import (
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
from cua_rl.devices.simulator.navigation import field_value
from cua_rl.devices.simulator.state import Field, PhoneState

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
    """The back arrow to the left of the title."""
    rect = Rect(x=2, y=STATUS_HEIGHT, width=28, height=CONTENT_TOP - STATUS_HEIGHT)
    return Element(
        element_id="arrow", label="Up", kind="nav", rect=rect, effect=Press(button=Button.BACK), glyph="arrow"
    )


def row(
    element_id: str,
    *,
    y: int = 0,
    text: str,
    label: str = "",
    detail: str = "",
    glyph: str = "",
    paper: Colour = "",
    ink: Colour = "#ffffff",
    effect: Effect | None = None,
    kind: Kind = "row",
    is_on: bool = False,
    height: int = ROW_HEIGHT,
) -> Element:
    """A row over the full width, with an icon on the left if `glyph` is given; `label` is its text unless given."""
    return Element(
        element_id=element_id,
        label=label or text,
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


def place(
    element_id: str,
    label: str,
    kind: Kind,
    rect: tuple[int, int, int, int],
    *,
    effect: Effect | None = None,
    text: str = "",
    glyph: str = "",
    paper: str = "",
    ink: str = "",
    is_on: bool = False,
) -> Element:
    """An element at (x, y, width, height), logical units."""
    x, y, width, height = rect
    box = Rect(x=x, y=y, width=width, height=height)
    return Element(
        element_id=element_id,
        label=label,
        kind=kind,
        rect=box,
        effect=effect,
        text=text,
        glyph=glyph,
        paper=paper,
        ink=ink,
        is_on=is_on,
    )


def text_field(state: PhoneState, field: Field, hint: str, rect: tuple[int, int, int, int]) -> Element:
    """A text field; it shows `hint` while empty and unfocused. Its label is the hint's first word."""
    value = field_value(state, field)
    text = value or ("" if state.focus == field else hint)
    return place(
        f"field:{field}",
        hint.split(maxsplit=1)[0],
        "field",
        rect,
        effect=FocusField(field=field),
        text=text,
        is_on=state.focus == field,
        ink="" if value else "hint",
    )


def add_field(column: Column, state: PhoneState, field: Field, hint: str) -> None:
    """A text field over the column's width."""
    column.y += 2
    column.add(text_field(state, field, hint, (12, column.y, WIDTH - 24, 26)))


def title_button(label: str, effect: Effect) -> Element:
    """A button at the right of the title, such as Save."""
    return place(label.lower(), label, "button", (140, 19, 44, 22), effect=effect, text=label)


def plus_button(subscreen: str) -> Element:
    """The round button at the bottom right that creates a new item."""
    return place(
        "new", "New", "round_button", (146, 256, 36, 36), effect=Push(subscreen=subscreen), glyph="plus", paper=BLUE
    )


def wide_button(label: str, y: int, effect: Do | Push, *, text: str | None = None) -> Element:
    """A button over most of the width."""
    return place(label.lower(), label, "button", (28, y, WIDTH - 56, 24), effect=effect, text=text or label)


Box = tuple[int, int, int, int]
"""x, y, width, height in logical units."""


def button(text: str, box: Box, effect: Effect, *, label: str = "") -> Element:
    """A filled button; `label` is its text unless given."""
    return _button("button", text, box, effect, label)


def pill(text: str, box: Box, effect: Effect | None) -> Element:
    """A plain button, greyed out without an effect."""
    return _button("pill", text, box, effect, "")


def _button(kind: str, text: str, box: Box, effect: Effect | None, label: str) -> Element:
    x, y, width, height = box
    return Element(
        element_id=f"{kind}:{text}",
        label=label or text,
        kind="button" if kind == "button" else "pill",
        rect=Rect(x=x, y=y, width=width, height=height),
        effect=effect,
        text=text,
    )


def switch_row(state: PhoneState, name: str, *, effect: Effect | None = None, detail: str = "") -> Element:
    """The row of one of the `SWITCHES`; flips it unless another effect is given."""
    return row(
        f"switch:{name}",
        label=SWITCHES[name],
        text=SWITCHES[name],
        detail=detail,
        effect=effect or Operate(command="switch", target=name),
        kind="switch_row",
        is_on=name in state.system.switched_on,
    )


def add_keypad(column: Column, keys: str, *, top: int, num_columns: int, key_height: int) -> None:
    """Keys of a dialler or a calculator."""
    width = (WIDTH - 24) // num_columns
    for i, key in enumerate(keys):
        rect = (12 + i % num_columns * width + 2, top + i // num_columns * key_height + 2, width - 4, key_height - 4)
        column.add(place(f"key:{key}", key, "key", rect, effect=Enter(key=key), text=key))


def slider(label: str, level: float, effect: Slide, glyph: str, *, y: int = 0) -> Element:
    """A slider over the full width; `level` is 0-1."""
    rect = Rect(x=0, y=y, width=WIDTH, height=36)
    return Element(
        element_id=f"slider:{effect.level}",
        label=label,
        kind="slider",
        rect=rect,
        effect=effect,
        level=level,
        glyph=glyph,
        paper=SETTINGS[glyph].paper,
        ink="#ffffff",
    )


def navigation_bar() -> tuple[Element, ...]:
    """The system buttons below every screen."""
    third = WIDTH // 3
    return tuple(
        Element(
            element_id=f"nav:{button.value}",
            label=button.value.capitalize(),
            kind="nav",
            rect=Rect(x=i * third, y=NAV_TOP, width=third, height=HEIGHT - NAV_TOP),
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
