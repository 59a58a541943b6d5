"""A real Android phone as a device: screenshots by `screencap`, actions by `input`."""

import asyncio
import re
import struct
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Literal

from cua_rl.environments.adb.keyboard import (
    BUTTON_KEYS,
    UNICODE_KEYBOARD,
    build_key_command,
    build_type_command,
    build_unicode_command,
    needs_unicode_keyboard,
)
from cua_rl.environments.android.queries import ANDROID_QUERIES, read_android_query
from cua_rl.environments.android.shell import AndroidConnection
from cua_rl.environments.app_names import find_package
from cua_rl.environments.device import NOT_ON_PHONES, ActionRejected, DeviceAbilities
from cua_rl.environments.query_values import PHONE_QUERIES
from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, DeviceServiceError, boundary

ANDROID_ABILITIES = DeviceAbilities(
    name="an Android phone over adb",
    has_shell=True,
    is_seeded=False,
    is_repeatable=False,  # phones keep what earlier rollouts did, unless they are emulators that load a snapshot
    queries={name: PHONE_QUERIES[name] for name in ANDROID_QUERIES},
)

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_WARNING_BYTES = 4096
_LAUNCHABLE = "cmd package query-activities --brief -a android.intent.action.MAIN -c android.intent.category.LAUNCHER"
_HARMLESS = "input keyevent 0"
"""KEYCODE_UNKNOWN, which no app reacts to."""
_SCROLL_S = 0.6
"""Slow enough that the list does not keep scrolling after the finger is lifted."""


class AndroidDevice:
    """One attached phone. `settle_s` is waited after every action, for animations to end.

    `give_back` is called once, when the phone is closed.
    """

    kind: Literal["android"] = "android"

    def __init__(
        self,
        connection: AndroidConnection,
        *,
        device_id: str,
        settle_s: float = 1.0,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._give_back = give_back
        self._connection = connection
        self.device_id = device_id
        self._settle_s = settle_s
        self._size_px: tuple[int, int] | None = None
        self._is_closed = False

    async def observe(self) -> EncodedImage:
        """Take a screenshot; raises `DeviceError`."""
        self._check_open("take a screenshot")
        observation = build_observation(await self._connection.screenshot())
        self._size_px = (observation.width_px, observation.height_px)
        return observation

    async def execute(self, action: actions.Action) -> None:
        """Do one action and let the screen settle; raises `ActionRejected` for what a phone cannot do."""
        self._check_open("act")
        if isinstance(action, actions.Wait):
            await asyncio.sleep(action.duration_s)
            return
        command = await self._build_command(action)
        said = await self._connection.run(command)
        if said.strip():  # `input` says nothing unless it failed
            if not (await self._connection.run(_HARMLESS)).strip():  # the phone takes input, but not this one
                raise ActionRejected(f"the phone refused this: {said.strip()[:200]}")
            raise DeviceError(f"expected {command!r} to print nothing on {self.device_id!r}, got {said[:300]!r}")
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
        """Release the phone without changing it; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._give_back()

    async def install_app(self, source: str) -> None:
        """Install an app from an address or from an APK file of this machine; raises `DeviceError`."""
        self._check_open("install an app")
        if source.startswith(("http://", "https://")):
            import httpx

            with boundary(DeviceServiceError, f"download {source!r}"):
                async with httpx.AsyncClient(follow_redirects=True, timeout=60.0) as http:
                    response = await http.get(source)
                    response.raise_for_status()
            with TemporaryDirectory() as folder:
                apk = Path(folder) / "app.apk"
                await asyncio.to_thread(apk.write_bytes, response.content)
                await self._connection.install(apk)
        else:
            await self._connection.install(Path(source))

    async def open_app(self, package: str, activity: str = "") -> None:
        """Open an app, at its main activity unless one is named; raises `DeviceError`."""
        self._check_open("open an app")
        await self._connection.run(build_open_command(package, activity))

    async def _build_command(self, action: actions.Action) -> str:
        run = self._connection.run
        match action:
            case actions.OpenApp(name=name):
                apps = re.findall(r"^\s*([\w.]+)/", await run(_LAUNCHABLE), re.MULTILINE)
                return f"{build_open_command(find_package(name, apps))} >/dev/null 2>&1"
            case actions.TypeText(text=text) if (
                needs_unicode_keyboard(text) and UNICODE_KEYBOARD in (await run("ime list -a -s")).split()
            ):
                keyboard = (await run("settings get secure default_input_method")).strip()
                return build_unicode_command(text, keyboard)
            case _:
                size_px = self._size_px
                if size_px is None:
                    seen = await self.observe()
                    size_px = seen.width_px, seen.height_px
                return build_input_command(action, size_px)

    def _check_open(self, doing: str) -> None:
        if self._is_closed:
            raise DeviceError(f"expected an open phone to {doing}, got {self.device_id!r}, which is closed")


def build_open_command(package: str, activity: str = "") -> str:
    """The shell line that opens an app."""
    if activity:
        return f"am start -n {quote(f'{package}/{activity}')}"
    return f"monkey -p {quote(package)} -c android.intent.category.LAUNCHER 1"


def build_observation(data: bytes) -> EncodedImage:
    """A screenshot from what `screencap -p` wrote; warnings before the picture (of several displays) are dropped."""
    start = data[: _MAX_WARNING_BYTES + len(_PNG)].find(_PNG)
    png = data[start:] if start >= 0 else b""
    if len(png) < 24 or png[12:16] != b"IHDR":
        raise DeviceError(f"expected a PNG from `screencap -p`, got {len(data)} bytes that begin {data[:80]!r}")
    if not png.rstrip(b"\r\n").endswith(b"IEND\xaeB`\x82"):
        raise DeviceError(f"expected a whole PNG from `screencap -p`, got {len(png)} bytes without its end")
    width_px, height_px = struct.unpack(">II", png[16:24])
    return EncodedImage(data=png, format="png", width_px=width_px, height_px=height_px)


def build_input_command(action: actions.Action, size_px: tuple[int, int]) -> str:
    """The shell line that does an action; raises `ActionRejected` for what a phone cannot do."""
    match action:
        case actions.Click(x=x, y=y):
            return _tap(x, y, size_px)
        case actions.DoubleClick(x=x, y=y):
            return f"{_tap(x, y, size_px)} && {_tap(x, y, size_px)}"
        case actions.LongPress(x=x, y=y, duration_s=duration_s):
            return _swipe((x, y), (x, y), duration_s, size_px)
        case actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y, duration_s=duration_s):
            return _swipe((x, y), (to_x, to_y), duration_s, size_px)
        case actions.Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            # a swipe against the scrolling, around the point, cut off near the edges of the screen
            _check_inside(x, y, size_px)
            if not down_px and not right_px:
                raise ActionRejected("scrolling by 0 pixels does nothing: give a distance")
            (x, to_x), (y, to_y) = _span(x, right_px, size_px[0]), _span(y, down_px, size_px[1])
            return _swipe((x, y), (to_x, to_y), _SCROLL_S, size_px)
        case actions.PressButton(button=button):
            return f"input keyevent {BUTTON_KEYS[button]}"
        case actions.TypeText(text=text):
            return build_type_command(text)
        case actions.PressKey(keys=keys):
            return build_key_command(keys)
        case _:
            raise ActionRejected(NOT_ON_PHONES.get(type(action), f"{type(action).__name__} is no input"))


def _tap(x: int, y: int, size_px: tuple[int, int]) -> str:
    _check_inside(x, y, size_px)
    return f"input tap {x} {y}"


def _swipe(start: tuple[int, int], end: tuple[int, int], duration_s: float, size_px: tuple[int, int]) -> str:
    _check_inside(*start, size_px)
    _check_inside(*end, size_px)
    return f"input swipe {start[0]} {start[1]} {end[0]} {end[1]} {round(duration_s * 1000)}"


def _span(at: int, distance: int, size: int) -> tuple[int, int]:
    """Start and end of a swipe on one axis, clear of the screen's edges, where system gestures begin."""
    low, high = size // 10, size - 1 - size // 10
    reach = min(abs(distance), high - low)
    first = min(max(at - reach // 2, low), high - reach) if reach else at
    return (first + reach, first) if distance > 0 else (first, first + reach)


def _check_inside(x: int, y: int, size_px: tuple[int, int]) -> None:
    width_px, height_px = size_px
    if not (0 <= x < width_px and 0 <= y < height_px):
        raise ActionRejected(f"({x}, {y}) is outside the screen of {width_px} x {height_px} pixels")
