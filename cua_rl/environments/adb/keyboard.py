"""Text and keys in the words of Android's `input` command."""

import re
from base64 import b64encode
from shlex import quote

from cua_rl.environments.device import ActionRejected
from cua_rl.types.actions import Button

BUTTON_KEYS: dict[Button, str] = {
    Button.BACK: "KEYCODE_BACK",
    Button.HOME: "KEYCODE_HOME",
    Button.RECENTS: "KEYCODE_APP_SWITCH",
    Button.POWER: "KEYCODE_POWER",
    Button.VOLUME_UP: "KEYCODE_VOLUME_UP",
    Button.VOLUME_DOWN: "KEYCODE_VOLUME_DOWN",
}
_KEYS = {
    "enter": "ENTER",
    "return": "ENTER",
    "backspace": "DEL",
    "delete": "FORWARD_DEL",
    "tab": "TAB",
    "space": "SPACE",
    "escape": "ESCAPE",
    "esc": "ESCAPE",
    "back": "BACK",
    "home": "HOME",
    "up": "DPAD_UP",
    "down": "DPAD_DOWN",
    "left": "DPAD_LEFT",
    "right": "DPAD_RIGHT",
    "page_up": "PAGE_UP",
    "page_down": "PAGE_DOWN",
    "ctrl": "CTRL_LEFT",
    "control": "CTRL_LEFT",
    "alt": "ALT_LEFT",
    "shift": "SHIFT_LEFT",
    "meta": "META_LEFT",
    "search": "SEARCH",
}
_CONTROL_KEYS = {"\n": "KEYCODE_ENTER", "\t": "KEYCODE_TAB"}


UNICODE_KEYBOARD = "com.android.adbkeyboard/.AdbIME"
"""ADBKeyBoard: an input method that types what a broadcast tells it to, in any script."""


def needs_unicode_keyboard(text: str) -> bool:
    """Whether `input text` does not know all of its characters."""
    return any(not (" " <= char <= "~" or char in _CONTROL_KEYS) for char in text)


def build_unicode_command(text: str, keyboard: str) -> str:
    """The shell line that types any text through `UNICODE_KEYBOARD` and then selects `keyboard` again."""
    message = b64encode(text.encode()).decode()
    return (
        f"ime enable {UNICODE_KEYBOARD} >/dev/null && ime set {UNICODE_KEYBOARD} >/dev/null && sleep 1 && "
        f"am broadcast -a ADB_INPUT_B64 --es msg {quote(message)} >/dev/null && "
        f"sleep 1 && ime set {quote(keyboard)} >/dev/null"
    )


def build_type_command(text: str) -> str:
    """The shell line that types text into what has the focus.

    Raises `ActionRejected` for characters without a key: `input text` knows printable ASCII, line breaks and tabs.
    """
    foreign = sorted({char for char in text if not (" " <= char <= "~" or char in _CONTROL_KEYS)})
    if foreign:
        raise ActionRejected(
            f"this phone types plain ASCII only, not {''.join(foreign)!r}: leave these characters out or replace them"
        )
    if not text:
        raise ActionRejected("there is nothing to type: give some text")
    commands: list[str] = []
    for part in re.split(r"([\n\t])", text):
        if part in _CONTROL_KEYS:
            commands.append(f"input keyevent {_CONTROL_KEYS[part]}")
        elif part:
            # text that itself has "%s" is split there, or `input text` would type a space
            pieces = re.split(r"(?<=%)(?=s)", part)
            commands += [f"input text {quote(piece.replace(' ', '%s'))}" for piece in pieces]
    return " && ".join(commands)


def build_key_command(keys: tuple[str, ...]) -> str:
    """The shell line that presses keys together; raises `ActionRejected` for a key that Android does not have."""
    codes: list[str] = []
    for name in keys:
        key = name.strip().lower().replace(" ", "_")
        code = key.upper() if re.fullmatch(r"[a-z0-9]|f([1-9]|1[0-2])", key) else _KEYS.get(key)
        if code is None:
            raise ActionRejected(
                f"this phone has no key {name!r}: it knows letters, digits, {', '.join(sorted(_KEYS))}"
            )
        codes.append(f"KEYCODE_{code}")
    if not codes:
        raise ActionRejected("there is no key to press: name at least one")
    return f"input keyevent {codes[0]}" if len(codes) == 1 else f"input keycombination {' '.join(codes)}"
