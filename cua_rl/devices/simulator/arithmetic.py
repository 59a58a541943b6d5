"""What the Calculator app computes: numbers and + - * / with the usual precedence."""

import re

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VALID = re.compile(r"-?\d+(?:\.\d+)?(?:[-+*/]\d+(?:\.\d+)?)*")


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
