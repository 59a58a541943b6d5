"""Keys of a keyboard, by the names that models give them."""

from cua_rl.environments.device import ActionRejected

_NAMES = {
    name.lower(): name
    for name in (
        *("Alt", "Control", "Meta", "Shift", "Enter", "Escape", "Space", "Tab", "Backspace", "Delete", "Insert"),
        *("ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp", "Home", "End", "PageDown", "PageUp"),
        *(f"F{number}" for number in range(1, 13)),
    )
} | {
    "cmd": "Meta",
    "ctrl": "Control",
    "del": "Delete",
    "down": "ArrowDown",
    "esc": "Escape",
    "left": "ArrowLeft",
    "page_down": "PageDown",
    "page_up": "PageUp",
    "return": "Enter",
    "right": "ArrowRight",
    "super": "Meta",
    "up": "ArrowUp",
    "win": "Meta",
}


_OF_OPENAI = {"Control": "CTRL", "Escape": "ESC", "Meta": "WIN"}
_OF_X11 = {
    **{"Alt": "alt", "Control": "ctrl", "Meta": "super", "Shift": "shift", "Enter": "Return", "Space": "space"},
    **{"Backspace": "BackSpace", "PageDown": "Page_Down", "PageUp": "Page_Up", " ": "space", "+": "plus", "-": "minus"},
    **{"=": "equal", ".": "period", ",": "comma", "/": "slash", "\\": "backslash", ";": "semicolon"},
    **{"'": "apostrophe", "`": "grave"},
}


def openai_key(key: str) -> str:
    """What OpenAI's computer tools call a key; unknown names are kept."""
    name = _NAMES.get(key.strip().lower())
    return key if name is None else _OF_OPENAI.get(name, name.upper())


def x11_key(key: str) -> str:
    """What X11, xdotool and so Anthropic's computer tool call a key; unknown names are kept."""
    name = _NAMES.get(key.strip().lower(), key)
    return _OF_X11.get(name, name.removeprefix("Arrow"))


def key_chord(keys: tuple[str, ...]) -> str:
    """Keys pressed together, such as "Control+s"; raises `ActionRejected` for an unknown key."""
    names: list[str] = []
    for key in keys:
        # Playwright's keyboard is American: another character would be an error of the browser
        name = key if len(key) == 1 and (" " <= key <= "~" or key in "\r\n") else _NAMES.get(key.strip().lower())
        if name is None:
            raise ActionRejected(
                f"There is no key {key!r}. Expected an ASCII character or one of {', '.join(sorted(_NAMES))}."
            )
        names.append(name)
    return "+".join(names)
