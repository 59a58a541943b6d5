"""A real Android phone as a device: screenshots by `screencap`, actions by `input`."""

import asyncio
import struct
from typing import Literal

from cua_rl.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    LongPress,
    MoveMouse,
    OpenApp,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.devices.android.keyboard import BUTTON_KEYS, build_key_command, build_type_command
from cua_rl.devices.android.queries import ANDROID_QUERIES, read_android_query
from cua_rl.devices.android.shell import AndroidConnection
from cua_rl.devices.device import ActionRejected, DeviceAbilities
from cua_rl.errors import DeviceError
from cua_rl.types import Observation

ANDROID_ABILITIES = DeviceAbilities(
    name="an Android phone over adb", has_shell=True, is_seeded=False, queries=frozenset(ANDROID_QUERIES)
)

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_WARNING_BYTES = 4096
_SCROLL_S = 0.6
"""Slow enough that the list does not fly on when the finger is lifted."""


class AndroidDevice:
    """One attached phone. `settle_s` is waited after every action, for animations to end."""

    def __init__(self, connection: AndroidConnection, *, device_id: str, settle_s: float = 1.0) -> None:
        self._connection = connection
        self._device_id = device_id
        self._settle_s = settle_s
        self._size_px: tuple[int, int] | None = None
        self._is_closed = False

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def kind(self) -> Literal["android"]:
        return "android"

    async def observe(self) -> Observation:
        """Take a screenshot; raises `DeviceError`."""
        self._check_open("take a screenshot")
        observation = build_observation(await self._connection.screenshot())
        self._size_px = (observation.width_px, observation.height_px)
        return observation

    async def execute(self, action: Action) -> None:
        """Do one action and let the screen settle; raises `ActionRejected` for what a phone cannot do."""
        self._check_open("act")
        if isinstance(action, Wait):
            await asyncio.sleep(action.duration_s)
            return
        command = build_input_command(action, await self._screen_size_px())
        said = await self._connection.run(command)
        if said.strip():  # `input` says nothing unless it failed
            raise DeviceError(f"expected {command!r} to print nothing on {self._device_id!r}, got {said[:300]!r}")
        await asyncio.sleep(self._settle_s)

    async def query(self, name: str) -> str:
        """Read one piece of state; raises `TaskError` for a name that no real phone answers."""
        self._check_open("answer a query")
        return await read_android_query(self._connection, name)

    async def shell(self, command: str) -> str:
        """Run a command and return what it printed; raises `DeviceError`."""
        self._check_open("run a command")
        return await self._connection.run(command)

    async def close(self) -> None:
        """Use the phone no more; safe to call twice. The phone stays as it is."""
        self._is_closed = True

    async def _screen_size_px(self) -> tuple[int, int]:
        if self._size_px is None:
            await self.observe()
        if self._size_px is None:
            raise DeviceError(f"expected a screenshot of {self._device_id!r} to have a size, got none")
        return self._size_px

    def _check_open(self, doing: str) -> None:
        if self._is_closed:
            raise DeviceError(f"expected an open phone to {doing}, got {self._device_id!r}, which is closed")


def build_observation(data: bytes) -> Observation:
    """A screenshot from what `screencap -p` wrote; warnings before the picture (of several displays) are dropped."""
    start = data[: _MAX_WARNING_BYTES + len(_PNG)].find(_PNG)
    png = data[start:] if start >= 0 else b""
    if len(png) < 24 or png[12:16] != b"IHDR":
        raise DeviceError(f"expected a PNG from `screencap -p`, got {len(data)} bytes that begin {data[:80]!r}")
    if not png.rstrip(b"\r\n").endswith(b"IEND\xaeB`\x82"):
        raise DeviceError(f"expected a whole PNG from `screencap -p`, got {len(png)} bytes without its end")
    width_px, height_px = struct.unpack(">II", png[16:24])
    return Observation(png=png, width_px=width_px, height_px=height_px)


def build_input_command(action: Action, size_px: tuple[int, int]) -> str:
    """The shell line that does an action; raises `ActionRejected` for what a phone cannot do."""
    match action:
        case Click(x=x, y=y):
            return _tap(x, y, size_px)
        case DoubleClick(x=x, y=y):
            return f"{_tap(x, y, size_px)} && {_tap(x, y, size_px)}"
        case LongPress(x=x, y=y, duration_s=duration_s):
            return _swipe((x, y), (x, y), duration_s, size_px)
        case Drag(x=x, y=y, to_x=to_x, to_y=to_y, duration_s=duration_s):
            return _swipe((x, y), (to_x, to_y), duration_s, size_px)
        case Scroll():
            return _scroll(action, size_px)
        case PressButton(button=button):
            return f"input keyevent {BUTTON_KEYS[button]}"
        case TypeText(text=text):
            return build_type_command(text)
        case PressKey(keys=keys):
            return build_key_command(keys)
        case _:
            raise ActionRejected(_why_not(action))


def _why_not(action: OpenApp | RightClick | MoveMouse | Wait) -> str:
    match action:
        case OpenApp(name=name):
            return f"this phone cannot open {name!r} by its name: tap its icon"
        case RightClick():
            return "a phone has no right mouse button: tap or long-press instead"
        case MoveMouse():
            return "a phone has no mouse: tap instead"
        case Wait():
            return "waiting is no input"


def _tap(x: int, y: int, size_px: tuple[int, int]) -> str:
    _check_inside(x, y, size_px)
    return f"input tap {x} {y}"


def _swipe(start: tuple[int, int], end: tuple[int, int], duration_s: float, size_px: tuple[int, int]) -> str:
    _check_inside(*start, size_px)
    _check_inside(*end, size_px)
    return f"input swipe {start[0]} {start[1]} {end[0]} {end[1]} {round(duration_s * 1000)}"


def _scroll(action: Scroll, size_px: tuple[int, int]) -> str:
    """A swipe against the scrolling, around the point, cut off at the borders of the screen."""
    _check_inside(action.x, action.y, size_px)
    if not action.down_px and not action.right_px:
        raise ActionRejected("scrolling by 0 pixels does nothing: give a distance")
    x, to_x = _span(action.x, action.right_px, size_px[0])
    y, to_y = _span(action.y, action.down_px, size_px[1])
    return _swipe((x, y), (to_x, to_y), _SCROLL_S, size_px)


def _span(at: int, distance: int, size: int) -> tuple[int, int]:
    """From where to where a finger moves on one axis, as far from the edges (where gestures begin) as a tenth."""
    low, high = size // 10, size - 1 - size // 10
    reach = min(abs(distance), high - low)
    first = min(max(at - reach // 2, low), high - reach) if reach else at
    return (first + reach, first) if distance > 0 else (first, first + reach)


def _check_inside(x: int, y: int, size_px: tuple[int, int]) -> None:
    width_px, height_px = size_px
    if not (0 <= x < width_px and 0 <= y < height_px):
        raise ActionRejected(f"({x}, {y}) is outside the screen of {width_px} x {height_px} pixels")
