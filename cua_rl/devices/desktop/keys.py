# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
"""Which keysym a model's name for a key, or a character, stands for."""

from Xlib import XK

from cua_rl.devices.device import ActionRejected

_NAMES = {
    "ctrl": "Control_L", "control": "Control_L", "shift": "Shift_L", "alt": "Alt_L", "option": "Alt_L",
    "super": "Super_L", "meta": "Super_L", "win": "Super_L", "cmd": "Super_L",
    "enter": "Return", "return": "Return", "esc": "Escape", "escape": "Escape", "tab": "Tab", "space": "space",
    "backspace": "BackSpace", "delete": "Delete", "del": "Delete", "insert": "Insert",
    "up": "Up", "down": "Down", "left": "Left", "right": "Right",
    "arrowup": "Up", "arrowdown": "Down", "arrowleft": "Left", "arrowright": "Right",
    "home": "Home", "end": "End", "pageup": "Prior", "page_up": "Prior", "pagedown": "Next", "page_down": "Next",
    "capslock": "Caps_Lock", "printscreen": "Print", "menu": "Menu",
}  # fmt: skip
_CONTROL_CHARACTERS = {"\n": "Return", "\r": "Return", "\t": "Tab", "\b": "BackSpace"}
_UNICODE_KEYSYMS = 0x01000000  # keysyms of characters beyond Latin-1, X11 protocol, appendix A


def keysym_of_key(name: str) -> int:
    """The keysym of "ctrl", "F5", "a" or "é"; raises `ActionRejected`, with advice for the model, for no known key."""
    if len(name) == 1:
        return keysym_of_character(name)
    folded = name.lower()
    keysym = XK.string_to_keysym(_NAMES.get(folded, folded.upper() if folded[:1] == "f" else name))
    if not keysym:
        raise ActionRejected(f"There is no key {name!r}. Keys have names such as ctrl, enter, esc, pagedown, F5 or a.")
    return keysym


def keysym_of_character(character: str) -> int:
    """The keysym that types a character."""
    named = _CONTROL_CHARACTERS.get(character)
    if named is not None:
        return XK.string_to_keysym(named)
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        raise ActionRejected(f"The character {character!r} cannot be typed. Press keys instead.")
    return code if code <= 0xFF else _UNICODE_KEYSYMS + code
