"""The processes of one desktop: X server, window manager and programs, as an ordinary user in a home of their own."""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from cua_rl.errors import ConfigError, DeviceError
from cua_rl.processes import OwnedProcess

PROGRAMS = ("Xvfb", "openbox", "setpriv")
"""Programs that desktops need (Debian: xvfb, openbox, util-linux)."""
_NOBODY = 65534
_START_TIMEOUT_S = 20.0
_POLL_S = 0.02


def require_programs() -> None:
    """Raise `ConfigError` if this machine lacks a program that desktops need."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise ConfigError(
            f"expected {', '.join(PROGRAMS)} on PATH for Linux desktops, got no {', '.join(missing)}; run "
            "scripts/install_system_packages.sh, or apt-get install xvfb openbox"
        )


class DesktopSession:
    """One X server with a window manager in the folder `home`; programs are started in it and end with it.

    Run by root, all of it belongs to the user `nobody`: programs that an agent operates must not own the machine.
    """

    def __init__(self, home: Path, *, width_px: int, height_px: int) -> None:
        self.home = home
        self._size = f"{width_px}x{height_px}x24"
        self._logs = home.with_name(home.name + ".logs")
        self._stack = AsyncExitStack()
        self._programs = AsyncExitStack()
        self.display = ""

    async def start(self) -> None:
        """Start the X server and the window manager; raises `DeviceError`."""
        await asyncio.to_thread(self._make_home)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.display = await self._start_server()
                await self._stack.enter_async_context(self._owned(["openbox", "--sm-disable"], "openbox"))
        except TimeoutError:
            await self.stop()
            raise DeviceError(
                f"expected an X server within {_START_TIMEOUT_S:g} s, got none; see {self._logs / 'xvfb.log'}"
            ) from None

    async def run_program(self, command: Sequence[str]) -> None:
        """Start a program of the desktop, such as ["mousepad", "note.txt"], in the home folder; do not wait for it."""
        await self._programs.enter_async_context(self._owned(command, Path(command[0]).name))

    async def shell(self, command: str) -> str:
        """Run a shell command as the desktop's user and return what it printed; raises `DeviceError`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *_as_user(["sh", "-c", command]),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                cwd=self.home,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceError(f"expected to run {command!r} on the desktop, got {error}") from error
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, 9)
                await process.wait()
        return output.decode(errors="replace")

    def write_file(self, path: Path, text: str) -> None:
        """Write a file that belongs to the desktop's user."""
        path.write_text(text, encoding="utf-8")
        if os.geteuid() == 0:
            os.chown(path, _NOBODY, _NOBODY)

    async def end_programs(self) -> None:
        """End every program that was started, and empty the home folder."""
        await self._programs.aclose()
        await asyncio.to_thread(shutil.rmtree, self.home, ignore_errors=True)
        await asyncio.to_thread(self._make_home)

    async def stop(self) -> None:
        """End everything and remove the home folder; safe to call twice."""
        await self._programs.aclose()
        await self._stack.aclose()
        for folder in (self.home, self._logs):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _start_server(self) -> str:
        """The X server picks a free display and writes its number into its log."""
        command = ["Xvfb", "-displayfd", "1", "-screen", "0", self._size, "-nolisten", "tcp", "-noreset"]
        server = self._owned(command, "xvfb")
        await self._stack.enter_async_context(server)
        while True:
            words = (await asyncio.to_thread(server.log_path.read_text)).split() if server.log_path.exists() else []
            number = next((word for word in words if word.isdigit()), None)
            if number is not None:
                return f":{number}"
            if not server.is_running:
                raise DeviceError(f"expected an X server, it ended: {' '.join(words)[-300:]!r}")
            await asyncio.sleep(_POLL_S)

    def _owned(self, command: Sequence[str], name: str) -> OwnedProcess:
        return OwnedProcess(
            _as_user(["env", "-C", str(self.home), *command]),
            name=f"{self.home.name}-{name}",
            log_path=self._logs / f"{name}.log",
            environment=self._environment(),
            stop_timeout_s=1.0,
        )

    def _environment(self) -> dict[str, str]:
        """A minimal environment; the controller's holds API keys."""
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home / ".runtime"),
            "DISPLAY": self.display,
            "LANG": "C.UTF-8",
            "NO_AT_BRIDGE": "1",  # GTK programs would wait for an accessibility bus
            "GSETTINGS_BACKEND": "memory",  # no settings daemon either
        }

    def _make_home(self) -> None:
        for folder in (self.home, self.home / ".runtime"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            if os.geteuid() == 0:
                os.chown(folder, _NOBODY, _NOBODY)


def _as_user(command: Sequence[str]) -> list[str]:
    """The command, run by an ordinary user."""
    if os.geteuid() != 0:
        return list(command)
    return ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--", *command]
