"""The names that agents give to keys, as Playwright calls them."""

from cua_rl.devices.device import ActionRejected

_NAMES = {
    "alt": "Alt",
    "arrowdown": "ArrowDown",
    "arrowleft": "ArrowLeft",
    "arrowright": "ArrowRight",
    "arrowup": "ArrowUp",
    "backspace": "Backspace",
    "cmd": "Meta",
    "control": "Control",
    "ctrl": "Control",
    "del": "Delete",
    "delete": "Delete",
    "down": "ArrowDown",
    "end": "End",
    "enter": "Enter",
    "esc": "Escape",
    "escape": "Escape",
    "home": "Home",
    "insert": "Insert",
    "left": "ArrowLeft",
    "meta": "Meta",
    "page_down": "PageDown",
    "page_up": "PageUp",
    "pagedown": "PageDown",
    "pageup": "PageUp",
    "return": "Enter",
    "right": "ArrowRight",
    "shift": "Shift",
    "space": "Space",
    "super": "Meta",
    "tab": "Tab",
    "up": "ArrowUp",
    "win": "Meta",
} | {f"f{number}": f"F{number}" for number in range(1, 13)}


def key_chord(keys: tuple[str, ...]) -> str:
    """Keys pressed together, such as "Control+s"; raises `ActionRejected` for a key that no keyboard has."""
    return "+".join(map(_key, keys))


def _key(name: str) -> str:
    if len(name) == 1:
        return name
    known = _NAMES.get(name.strip().lower())
    if known is None:
        raise ActionRejected(f"There is no key {name!r}. Expected a character or one of {', '.join(sorted(_NAMES))}.")
    return known
