"""Buttons and rows that system pages share."""

from cua_rl.devices.simulator.elements import Effect, Element, Operate, Rect
from cua_rl.devices.simulator.layout import row
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import SWITCHES

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


def switch_row(state: PhoneState, name: str, y: int, *, effect: Effect | None = None, detail: str = "") -> Element:
    """The row of one of the `SWITCHES`; flips it unless another effect is given."""
    return row(
        f"switch:{name}",
        y=y,
        label=SWITCHES[name],
        text=SWITCHES[name],
        detail=detail,
        effect=effect or Operate(command="switch", target=name),
        kind="switch_row",
        is_on=name in state.system.switched_on,
    )
