"""Calculator: numbers and + - * / with the usual precedence."""

import re

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import Column, add_keypad, place
from cua_rl.environments.phone.simulator.state import PhoneState

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VALID = re.compile(r"-?\d+(?:\.\d+)?(?:[-+*/]\d+(?:\.\d+)?)*")


def build_calculator(state: PhoneState, column: Column) -> None:
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
        first, *factors = (float(number) for number in _NUMBER.findall(product))
        for operator, factor in zip(re.findall(r"[*/]", product), factors, strict=True):
            if operator == "/" and factor == 0:
                return "Error"
            first = first * factor if operator == "*" else first / factor
        total += -first if sign == "-" else first
    return f"{total:.10g}"
