"""A Linux desktop as a device: pictures of its X display, XTEST input, files and windows to validate by."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from Xlib.error import ConnectionClosedError

from cua_rl.environments.desktop.png_bands import BandedPng
from cua_rl.environments.desktop.session import DesktopSession
from cua_rl.environments.desktop.x_screen import RIGHT, XScreen
from cua_rl.environments.device import ActionRejected, DeviceAbilities
from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, DeviceTimeoutError, TaskError, UnusableError, boundary

DESKTOP_ABILITIES = DeviceAbilities(name="Linux desktops", has_shell=True, is_seeded=True, environment="desktop")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SETTLE_GAP_S = 0.015
_SETTLE_LIMIT_S = 0.3
_REACTION_S = 0.06
"""How long to wait for the first drawing; most actions draw at once, a few draw nothing."""
_DRAWN_GAP_S = 0.25
_DRAWN_LIMIT_S = 5.0
"""A program draws its window a while after it has opened it, and only then takes keys."""
_WINDOW_TIMEOUT_S = 60.0  # programs start slowly on a machine that is busy with others
_FILE_TIMEOUT_S = 20.0
_POLL_S = 0.05
_PROOF_TIMEOUT_S = 5.0


class LinuxDesktop:
    """One desktop. Its X connection lives in its own thread, so nothing here blocks the event loop."""

    kind: Literal["linux"] = "linux"

    def __init__(self, session: DesktopSession, *, device_id: str, screen_timeout_s: float = 60.0) -> None:
        self._session = session
        self._screen_timeout_s = screen_timeout_s
        self.device_id = device_id
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=device_id)
        # what programs write may make a read slow: that delays only the validators of this desktop
        self._file_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{device_id}-files")
        self._screen: XScreen | None = None
        self._packer = BandedPng()
        self._last_seen: EncodedImage | None = None

    @property
    def home(self) -> Path:
        """The home folder of the desktop's user on this machine; in their sandbox, programs have it as `$HOME`."""
        return self._session.home

    @property
    def display(self) -> str:
        """The X display, such as ":91"; "" before it has started."""
        return self._session.display

    @property
    def authority(self) -> Path:
        """The file whose cookie opens the display."""
        return self._session.authority

    async def start(self) -> None:
        """Start the desktop and wait for its window manager; raises `DeviceError`."""
        await self._session.start()
        deadline = time.monotonic() + _WINDOW_TIMEOUT_S
        self._screen = await self._in_thread(XScreen, self._session.display, self._session.authority)
        while not await self._in_thread(self._screen.has_window_manager):
            if time.monotonic() > deadline:
                raise DeviceError(f"expected a window manager on {self.device_id!r}, got none")
            await asyncio.sleep(_POLL_S)
        await self._in_thread(self._screen.move, 0, 0)  # out of the way of what is going to be read

    async def observe(self) -> EncodedImage:
        """Take a screenshot; raises `DeviceError`."""
        self._last_seen = await self._in_thread(_observe, self._open_screen(), self._packer, self._last_seen)
        return self._last_seen

    async def execute(self, action: actions.Action) -> None:
        """Do one action and wait until nothing has been drawn for a moment, at most a third of a second."""
        if isinstance(action, actions.Wait):
            await asyncio.sleep(action.duration_s)
            return
        await self._in_thread(_do, self._open_screen(), action)
        await self._settle()

    async def query(self, name: str) -> str:
        """`file:<path in the home folder>` (its text, "" if none), `files` (one path a line) or `window_titles`.

        What is no ordinary file of at most a MiB, such as a link or a pipe, has no text.
        """
        what, _, argument = name.partition(":")
        match what:
            case "file":
                return await self._with_files(self._session.files.read_text, argument)
            case "files":
                return await self._with_files(self._session.files.listing)
            case "window_titles":
                return "\n".join(await self._in_thread(self._open_screen().window_titles))
            case _:
                raise TaskError(f"expected a query file:<path>, files or window_titles, got {name!r}")

    async def shell(self, command: str) -> str:
        """Run a command as the desktop's user, in its home folder, and return what it printed."""
        return await self._session.shell(command)

    async def write_file(self, name: str, text: str) -> None:
        """Put a file into the home folder, as its user's own."""
        await self._with_files(self._session.files.write_text, name, text)

    async def run_program(self, command: Sequence[str], *, window: str) -> None:
        """Start a program and wait for a window whose title has `window` in it; raises `DeviceError`."""
        await self._session.run_program(command)
        deadline = time.monotonic() + _WINDOW_TIMEOUT_S
        while window not in (titles := "\n".join(await self._in_thread(self._open_screen().window_titles))):
            if time.monotonic() > deadline:
                raise DeviceError(f"expected a window {window!r} on {self.device_id!r}, got {titles!r}")
            await asyncio.sleep(_POLL_S)
        await self._settle(gap_s=_DRAWN_GAP_S, limit_s=_DRAWN_LIMIT_S)

    async def close(self) -> None:
        """End everything; safe to call twice."""
        screen, self._screen = self._screen, None
        await self._session.stop()  # first: if a program has halted the X server, only its end frees our thread
        if screen is not None:
            with suppress(DeviceError):  # the server is gone, as it should be
                await self._in_thread(screen.close)
        self._thread.shutdown(wait=False)
        self._file_thread.shutdown(wait=False)

    async def _settle(self, gap_s: float = _SETTLE_GAP_S, limit_s: float = _SETTLE_LIMIT_S) -> None:
        """Wait for the first drawing, if there is one at all, then until nothing has been drawn for `gap_s`."""
        began = time.monotonic()
        screen, has_begun = self._open_screen(), False
        while time.monotonic() - began < limit_s:
            await asyncio.sleep(gap_s)
            has_changed = await self._in_thread(screen.has_changed)
            has_begun |= has_changed
            if not has_changed and (has_begun or time.monotonic() - began >= _REACTION_S):
                return

    def _open_screen(self) -> XScreen:
        if self._screen is None:
            raise DeviceError(f"expected an open desktop, got {self.device_id!r}, which is closed")
        return self._screen

    async def _with_files(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_FILE_TIMEOUT_S):
                return await loop.run_in_executor(self._file_thread, lambda: function(*args, **kwargs))
        except TimeoutError:
            raise DeviceTimeoutError(
                f"expected the files of {self.device_id!r} within {_FILE_TIMEOUT_S:g} s, got no answer"
            ) from None

    async def _in_thread(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a call on the X thread; any error of a lost X server becomes a `DeviceError`.

        It is an `UnusableError` if the X server was ended or ended our connection, or does not answer although the
        machine starts programs: the desktop's programs have the rights to do all that.
        """
        loop = asyncio.get_running_loop()
        try:
            with boundary(DeviceError, f"the desktop {self.device_id!r} was lost"):
                try:
                    async with asyncio.timeout(self._screen_timeout_s):
                        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
                except ActionRejected as error:
                    rejected = error  # the desktop is well: the model gets the message
        except DeviceError as error:
            is_late = isinstance(error.__cause__, TimeoutError)
            # a connection ends before its server counts as ended
            is_gone = isinstance(error.__cause__, ConnectionClosedError) or self._session.has_lost_screen
            if is_gone or (is_late and await _starts_programs()):
                raise UnusableError(
                    f"expected the screen of {self.device_id!r}, but its programs ended or block it"
                ) from error
            raise
        raise rejected


async def _starts_programs() -> bool:
    """Whether this machine still does, so that it is not what is slow."""
    try:
        async with asyncio.timeout(_PROOF_TIMEOUT_S):
            return await (await asyncio.create_subprocess_exec("true")).wait() == 0
    except (OSError, TimeoutError):
        return False


def _observe(screen: XScreen, packer: BandedPng, last: EncodedImage | None) -> EncodedImage:
    """A screenshot, or the previous one if nothing has been drawn since."""
    screen.has_changed()
    if last is not None and not screen.is_stale:
        return last
    bgra, width_px, height_px = screen.grab()
    return EncodedImage(data=packer.encode(bgra, width_px), format="png", width_px=width_px, height_px=height_px)


def _do(screen: XScreen, action: actions.Action) -> None:
    match action:
        case actions.Click(x=x, y=y):
            screen.click(x, y)
        case actions.DoubleClick(x=x, y=y):
            screen.click(x, y, times=2)
        case actions.RightClick(x=x, y=y):
            screen.click(x, y, button=RIGHT)
        case actions.LongPress(x=x, y=y, duration_s=duration_s):
            screen.click(x, y, hold_s=duration_s)
        case actions.MoveMouse(x=x, y=y):
            screen.move(x, y)
        case actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y, duration_s=duration_s):
            screen.drag(x, y, to_x, to_y, duration_s)
        case actions.Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            screen.scroll(x, y, down_px=down_px, right_px=right_px)
        case actions.TypeText(text=text):
            screen.type_text(text)
        case actions.PressKey(keys=keys):
            screen.press_keys(keys)
        case _:
            raise ActionRejected("A desktop has no such button: use mouse and keyboard.")
