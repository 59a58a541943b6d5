"""The on-screen keyboard that shows while a text field has the focus."""

from functools import lru_cache

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import NAV_TOP, place
from cua_rl.environments.phone.simulator.elements import Element, TypeKey
from cua_rl.environments.phone.simulator.state import KeyboardLayer

KEYBOARD_HEIGHT = 106
_ROW_HEIGHT = 26
_KEY_WIDTH = 19
_ROWS: dict[KeyboardLayer, tuple[str, str, str]] = {
    "lower": ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    "upper": ("QWERTYUIOP", "ASDFGHJKL", "ZXCVBNM"),
    "symbols": ("1234567890", "@#&-+()/:", "\"'!?;*%"),
}


@lru_cache(maxsize=3)
def keyboard_elements(layer: KeyboardLayer) -> tuple[Element, ...]:
    """All keys of a layer, in reading order."""
    top = NAV_TOP - KEYBOARD_HEIGHT + 2
    keys = [
        _key(key, (WIDTH - len(row) * _KEY_WIDTH) // 2 + i * _KEY_WIDTH, top + line * _ROW_HEIGHT)
        for line, row in enumerate(_ROWS[layer])
        for i, key in enumerate(row)
    ]
    third = top + 2 * _ROW_HEIGHT
    if layer != "symbols":
        other_case, text = ("upper", "Aa") if layer == "lower" else ("lower", "aA")
        keys.append(_key(other_case, 1, third, width=27, text=text))
    keys.append(_key("backspace", 162, third, width=29, text="Del"))
    bottom = top + 3 * _ROW_HEIGHT
    other_layer = "lower" if layer == "symbols" else "symbols"
    keys.append(_key(other_layer, 1, bottom, width=31, text="abc" if layer == "symbols" else "?123"))
    keys += _key(",", 33, bottom), _key(" ", 53, bottom, width=78, text="space"), _key(".", 132, bottom)
    return (*keys, _key("enter", 152, bottom, width=39, text="Enter"))


def _key(key: str, x: int, y: int, *, width: int = _KEY_WIDTH, text: str | None = None) -> Element:
    label = text or key
    return place(f"key:{key}", label, "key", (x, y, width, _ROW_HEIGHT), effect=TypeKey(key=key), text=label)
