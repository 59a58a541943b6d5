"""Calculator: numbers and + - * / with the usual precedence."""

import re

from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.controls import (
    Column,
    add_keypad,
    place,
)
from cua_rl.devices.simulator.state import PhoneState

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VALID = re.compile(r"-?\d+(?:\.\d+)?(?:[-+*/]\d+(?:\.\d+)?)*")


def build_calculator(state: PhoneState, column: Column) -> None:
    """The display and the keys."""
    column.add(
        place("display", "Display", "text", (14, 52, WIDTH - 28, 44), text=state.calculation or "0", ink="right")
    )
    add_keypad(column, "789/456*123-C0=+", top=104, num_columns=4, key_height=46)


def evaluate(text: str) -> str:
    """The value of a calculation as text ("2+3*4" -> "14"), or "Error"."""
    if not _VALID.fullmatch(text):
        return "Error"
    total = 0.0
    for sign, product in re.findall(r"([-+]?)([^-+]+)", text):
        value = _product(product)
        if value is None:
            return "Error"
        total += -value if sign == "-" else value
    return f"{total:.10g}"


def _product(text: str) -> float | None:
    first, *rest = _NUMBER.findall(text)
    value = float(first)
    for operator, number in zip((char for char in text if char in "*/"), rest, strict=True):
        if operator == "/" and float(number) == 0:
            return None
        value = value * float(number) if operator == "*" else value / float(number)
    return value
