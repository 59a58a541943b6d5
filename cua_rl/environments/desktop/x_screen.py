# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The mouse, the keyboard and the picture of one X display, without a process per action.

Everything here blocks for a moment (a screenshot 1 ms, a click 0.1 ms) and belongs to one thread.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import mss
from mss.base import MSSBase
from Xlib import XK, X, Xatom
from Xlib.display import Display
from Xlib.error import BadWindow
from Xlib.ext import damage, xtest
from Xlib.xobject.drawable import Window

from cua_rl.environments.device import ActionRejected

LEFT, RIGHT = 1, 3
_WHEEL_UP, _WHEEL_DOWN, _WHEEL_LEFT, _WHEEL_RIGHT = 4, 5, 6, 7
PX_PER_NOTCH = 50
"""How far one notch of the wheel is taken to scroll; programs differ."""
_DOUBLE_CLICK_GAP_S = 0.05
_DRAG_STEPS = 12
_MAX_TITLE_LENGTH = 1000
_MAX_WINDOWS = 1000
_REMAP_S = 0.03
"""How long programs get to learn that a key has a new meaning."""


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


_ENVIRONMENT_LOCK = Lock()


@contextmanager
def _xauthority(path: Path) -> Generator[None]:
    """Both libraries look for the cookie in the file that the environment names, and nowhere else.

    The variable is never removed again: other threads may be reading the environment in C, and removal moves it.
    """
    with _ENVIRONMENT_LOCK:
        before = os.environ.get("XAUTHORITY", os.path.expanduser("~/.Xauthority"))  # the default
        os.environ["XAUTHORITY"] = str(path)
        try:
            yield
        finally:
            os.environ["XAUTHORITY"] = before


@dataclass(slots=True)
class XScreen:
    """A connection to a display such as ":91", with the cookie in `authority`; raises `Xlib.error.DisplayError`."""

    name: str
    authority: Path
    _display: Display = field(init=False)
    _camera: MSSBase = field(init=False)
    _spare_keycodes: list[int] = field(init=False)
    """Keys without a meaning; assigned to characters that the keyboard does not have, the oldest assignment first."""
    _borrowed: dict[int, int] = field(default_factory=dict[int, int])
    """Keycode by keysym."""
    _damage: int = field(init=False)
    """The server's record of what has been drawn."""
    is_stale: bool = True
    """True if something was drawn since the last picture, as far as `has_changed` has been told."""

    def __post_init__(self) -> None:
        with _xauthority(self.authority):
            self._display = Display(self.name)
            self._camera = mss.MSS(display=self.name)
        first, last = self._display.display.info.min_keycode, self._display.display.info.max_keycode
        mapping = self._display.get_keyboard_mapping(first, last - first + 1)
        self._spare_keycodes = [first + i for i, keysyms in enumerate(mapping) if i and not any(keysyms)]
        self._display.damage_query_version()
        self._damage = self._display.screen().root.damage_create(damage.DamageReportNonEmpty)

    def grab(self) -> tuple[bytes, int, int]:
        """What the screen shows now: four bytes of each pixel (BGRA), and the width and height in pixels."""
        self.is_stale = False
        shot = self._camera.grab(self._camera.monitors[0])
        return bytes(shot.bgra), shot.width, shot.height

    def has_changed(self) -> bool:
        """Whether anything was drawn since the last call; far cheaper than comparing pictures."""
        self._display.sync()  # what was drawn before has been reported after this
        has_changed = False
        while self._display.pending_events():
            event = self._display.next_event()
            has_changed |= event.type == self._display.extension_event.DamageNotify
        if has_changed:
            self.is_stale = True
            self._display.damage_subtract(self._damage, X.NONE, X.NONE)  # the next drawing is reported again
            self._display.flush()
        return has_changed

    def move(self, x: int, y: int) -> None:
        """Put the mouse on a pixel."""
        xtest.fake_input(self._display, X.MotionNotify, x=x, y=y)
        self._display.sync()

    def click(self, x: int, y: int, *, button: int = LEFT, times: int = 1, hold_s: float = 0.0) -> None:
        """Press and release a button at a pixel, `times` times."""
        self.move(x, y)
        for number in range(times):
            if number:
                time.sleep(_DOUBLE_CLICK_GAP_S)
            self._button(button, hold_s)

    def drag(self, x: int, y: int, to_x: int, to_y: int, duration_s: float) -> None:
        """Press at one pixel, move to another, release."""
        self.move(x, y)
        xtest.fake_input(self._display, X.ButtonPress, LEFT)
        try:
            for step in range(1, _DRAG_STEPS + 1):
                self.move(x + (to_x - x) * step // _DRAG_STEPS, y + (to_y - y) * step // _DRAG_STEPS)
                time.sleep(duration_s / _DRAG_STEPS)
        finally:
            xtest.fake_input(self._display, X.ButtonRelease, LEFT)
            self._display.sync()

    def scroll(self, x: int, y: int, *, down_px: int, right_px: int) -> None:
        """Turn the wheel at a pixel, at least one notch in each direction that is asked for."""
        self.move(x, y)
        for distance_px, forward, backward in (
            (down_px, _WHEEL_DOWN, _WHEEL_UP),
            (right_px, _WHEEL_RIGHT, _WHEEL_LEFT),
        ):
            if distance_px:
                for _ in range(max(1, round(abs(distance_px) / PX_PER_NOTCH))):
                    self._button(forward if distance_px > 0 else backward)

    def type_text(self, text: str) -> None:
        """Type characters, also those that the keyboard does not have; raises `ActionRejected` for what has no key."""
        shift = self._display.keysym_to_keycode(keysym_of_key("shift"))
        for keysym in [keysym_of_character(character) for character in text]:
            keycode, is_shifted = self._key_for(keysym)
            self._press([shift, keycode] if is_shifted else [keycode])

    def press_keys(self, names: tuple[str, ...]) -> None:
        """Press keys together and release them; raises `ActionRejected` for a name that is no key."""
        self._press([self._key_for(keysym)[0] for keysym in [keysym_of_key(name) for name in names]])

    def window_titles(self) -> list[str]:
        """Titles of the windows that the window manager shows, oldest first."""
        root = self._display.screen().root
        listed = root.get_property(self._display.intern_atom("_NET_CLIENT_LIST"), X.AnyPropertyType, 0, _MAX_WINDOWS)
        utf8_name = self._display.intern_atom("_NET_WM_NAME")
        titles: list[str] = []
        # any program may write the list, and titles without end
        for window_id in listed.value if listed is not None and listed.format == 32 else ():
            window = self._display.create_resource_object("window", window_id)
            with suppress(BadWindow):  # it closed in between
                text = _text_of(window, utf8_name) or _text_of(window, Xatom.WM_NAME) or ""
                titles.append(text[:_MAX_TITLE_LENGTH].replace("\0", "\ufffd"))  # the database stores no NUL
        return titles

    def has_window_manager(self) -> bool:
        """True once a window manager has taken the display."""
        check = self._display.intern_atom("_NET_SUPPORTING_WM_CHECK")
        return self._display.screen().root.get_full_property(check, X.AnyPropertyType) is not None

    def close(self) -> None:
        """Leave the display; what it shows stays."""
        self._camera.close()
        self._display.close()

    def _button(self, button: int, hold_s: float = 0.0) -> None:
        xtest.fake_input(self._display, X.ButtonPress, button)
        self._display.sync()
        try:
            time.sleep(hold_s)
        finally:
            xtest.fake_input(self._display, X.ButtonRelease, button)
            self._display.sync()

    def _press(self, keycodes: list[int]) -> None:
        for keycode in keycodes:
            xtest.fake_input(self._display, X.KeyPress, keycode)
        for keycode in reversed(keycodes):
            xtest.fake_input(self._display, X.KeyRelease, keycode)
        self._display.sync()

    def _key_for(self, keysym: int) -> tuple[int, bool]:
        """A keycode that gives the keysym, and whether shift must be held; a spare key is given a missing keysym."""
        borrowed = self._borrowed.get(keysym)
        if borrowed is not None:
            return borrowed, False
        for keycode, level in self._display.keysym_to_keycodes(keysym):
            if level in (0, 1):
                return keycode, level == 1
        keycode = self._spare_keycodes.pop(0)
        self._spare_keycodes.append(keycode)
        self._borrowed = {known: code for known, code in self._borrowed.items() if code != keycode} | {keysym: keycode}
        self._display.change_keyboard_mapping(keycode, [(keysym, keysym)])
        self._display.sync()
        time.sleep(_REMAP_S)
        return keycode, False


def _text_of(window: Window, name: int) -> str | None:
    """The beginning of a property that is text."""
    found = window.get_property(name, X.AnyPropertyType, 0, _MAX_TITLE_LENGTH)  # in units of four bytes
    if found is None or found.format != 8:
        return None
    return found.value.decode("latin-1" if found.property_type == Xatom.STRING else "utf-8", errors="replace")


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
