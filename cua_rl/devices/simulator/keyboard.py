"""The on-screen keyboard that shows while a text field has the focus."""

from functools import lru_cache

from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.elements import Element, Rect, TypeKey
from cua_rl.devices.simulator.layout import NAV_TOP

KEYBOARD_HEIGHT = 106
_ROW_HEIGHT = 26
_KEY_WIDTH = 19
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


@lru_cache(maxsize=1)
def keyboard_elements() -> tuple[Element, ...]:
    """All keys, in reading order."""
    top = NAV_TOP - KEYBOARD_HEIGHT + 2
    keys = [_key(key, x, top + i * _ROW_HEIGHT) for i, keys in enumerate(_ROWS) for key, x in _spread(keys)]
    keys.append(_key("backspace", 162, top + 2 * _ROW_HEIGHT, width=29, text="Del"))
    bottom = top + 3 * _ROW_HEIGHT
    keys.append(_key(",", 1, bottom))
    keys.append(_key(" ", 21, bottom, width=110, text="space"))
    keys.append(_key(".", 132, bottom))
    keys.append(_key("enter", 152, bottom, width=39, text="Enter"))
    return tuple(keys)


def _spread(keys: str) -> list[tuple[str, int]]:
    left = (WIDTH - len(keys) * _KEY_WIDTH) // 2
    return [(key, left + i * _KEY_WIDTH) for i, key in enumerate(keys)]


def _key(key: str, x: int, y: int, *, width: int = _KEY_WIDTH, text: str | None = None) -> Element:
    return Element(
        element_id=f"key:{key}",
        label=text or key,
        kind="key",
        rect=Rect(x=x, y=y, width=width, height=_ROW_HEIGHT),
        effect=TypeKey(key=key),
        text=text or key,
    )
