"""Placed buttons, fields and pictures that several apps share."""

from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.elements import Do, Effect, Element, FocusField, Kind, Push, Rect
from cua_rl.devices.simulator.forms import field_value
from cua_rl.devices.simulator.layout import Column
from cua_rl.devices.simulator.state import Field, PhoneState

GREEN = "#2e9e4f"
RED = "#d32f2f"
BLUE = "#1f6fe5"


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
    """A text field that shows its hint while it is empty and without focus; the hint's first word is its label."""
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
    """The round button at the bottom right that makes something new."""
    return place(
        "new", "New", "round_button", (146, 256, 36, 36), effect=Push(subscreen=subscreen), glyph="plus", paper=BLUE
    )


def wide_button(label: str, y: int, effect: Do | Push, *, text: str | None = None) -> Element:
    """A button over most of the width."""
    return place(label.lower(), label, "button", (28, y, WIDTH - 56, 24), effect=effect, text=text or label)
