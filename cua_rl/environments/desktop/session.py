"""The processes of one desktop: X server, window manager and programs, as their own user in their own home."""

import asyncio
import os
import secrets
import shutil
import socket
import stat
import struct
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from cua_rl.environments.desktop.home import Home
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.sandbox import can_sandbox, join_sandbox, sandbox_to_join
from cua_rl.host.system import is_running
from cua_rl.host.users import GUEST_UIDS, SystemUser, can_change_user, claim_user
from cua_rl.types.errors import ConfigError, DeviceError

PROGRAMS = ("Xvfb", "openbox", "setpriv")
"""Programs that desktops need (Debian: xvfb, openbox, util-linux)."""
_SOCKETS = Path("/tmp/.X11-unix")
_SHOWN_HOME = Path("/tmp/home")
"""Where the sandbox of every desktop has the home folder, so that programs show the same path on each."""
_DISPLAYS = range(100, 10_000)
"""Far from the displays of people, which begin at 0."""
_SETTINGS = [Path(__file__).with_name(name) for name in ("openbox.xml", "settings.ini")]
_COOKIE_NAME = b"MIT-MAGIC-COOKIE-1"
_FAMILY_LOCAL, _FAMILY_WILD = 256, 65535
_MAX_OUTPUT_BYTES = 1 << 20
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
    """One X server with a window manager; programs are started in its home folder, in `folder`, and end with it.

    Run by root, all of it belongs to its own user: what an agent operates must reach neither the machine nor
    other desktops. Where the kernel permits it, it is a sandbox whose network has no way out.
    """

    def __init__(self, folder: Path, *, width_px: int, height_px: int) -> None:
        self._folder = folder
        self.home = folder / "home"
        self._size = f"{width_px}x{height_px}x24"
        self._logs, self._settings, self._temporary = folder / "logs", folder / "settings", folder / "tmp"
        self._shown_home = _SHOWN_HOME if can_sandbox() else self.home
        self._user = SystemUser()
        self._stack = AsyncExitStack()
        self.display = ""
        self._server: OwnedProcess | None = None

    @property
    def has_lost_screen(self) -> bool:
        """Whether the X server has ended although the desktop was not stopped: its user's programs may end it."""
        return self._server is not None and not self._server.is_running

    @property
    def authority(self) -> Path:
        """The file with the cookie that the X server requires."""
        return self._settings / "Xauthority"

    @property
    def files(self) -> Home:
        """What lies in the home folder."""
        return Home(self.home, self._user)

    async def start(self) -> None:
        """Start the X server and the window manager; raises `DeviceError`."""
        self._user = await asyncio.to_thread(claim_user, GUEST_UIDS)
        await asyncio.to_thread(self._make_folders)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.display = await self._start_server()
                command = ["openbox", "--sm-disable", "--config-file", str(self._settings / "openbox.xml")]
                await self._stack.enter_async_context(self._owned(self._inside(command), "openbox"))
        except TimeoutError:
            await self.stop()
            raise DeviceError(
                f"expected an X server within {_START_TIMEOUT_S:g} s, got none; see {self._logs / 'xvfb.log'}"
            ) from None

    async def run_program(self, command: Sequence[str]) -> None:
        """Start a program of the desktop, such as ["mousepad", "note.txt"], in the home folder; do not wait for it."""
        await self._stack.enter_async_context(self._owned(self._inside(command), Path(command[0]).name))

    async def shell(self, command: str) -> str:
        """Run a shell command as the desktop's user; what it printed, cut after a MiB; raises `DeviceError`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._inside(["sh", "-c", command]),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                cwd=self.home,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceError(f"expected to run {command!r} on the desktop, got {error}") from error
        assert process.stdout is not None
        output = b""
        try:
            while chunk := await process.stdout.read(_MAX_OUTPUT_BYTES - len(output)):
                output += chunk
            if len(output) < _MAX_OUTPUT_BYTES:
                await process.wait()
        finally:
            with suppress(ProcessLookupError):
                while process.returncode is None:  # wait() also waits for the end of the pipe, which others may hold
                    os.killpg(process.pid, 9)
                    await asyncio.sleep(_POLL_S)
        return output.decode(errors="replace")

    async def stop(self) -> None:
        """End everything and remove the home folder; safe to call twice."""
        self._server = None
        await self._stack.aclose()
        user, self._user = self._user, SystemUser()
        await asyncio.to_thread(user.release, self._folder)

    async def _start_server(self) -> str:
        """The X server writes the display's number into its log once it is ready.

        We pick the number: a server that picks it looks for abstract sockets, which are "local" to a network and have
        no owner, and without them would take over a display that another server of the same user has.
        """
        number = await asyncio.to_thread(_reserve_display)
        self._stack.callback(_lock_path(number).unlink, missing_ok=True)
        command = ["Xvfb", f":{number}", "-displayfd", "1", "-screen", "0", self._size, "-noreset"]
        command += ["-auth", str(self.authority), "-nolisten", "tcp", "-nolisten", "local"]
        places, moved = (self._settings, _SOCKETS), [(self.home, _SHOWN_HOME)]
        box = sandbox_to_join((), self._temporary, *places, moved=moved) if can_sandbox() else []
        server = self._owned([*box, *self._at_home(command)], "xvfb")
        await self._stack.enter_async_context(server)
        while True:
            words = (await asyncio.to_thread(server.log_path.read_text)).split() if server.log_path.exists() else []
            if str(number) in words:
                await asyncio.to_thread(_close_to_others, _SOCKETS / f"X{number}", self._user)
                self._server = server
                return f":{number}"
            if not server.is_running:
                raise DeviceError(f"expected an X server, it ended: {' '.join(words)[-300:]!r}")
            await asyncio.sleep(_POLL_S)

    def _inside(self, command: Sequence[str]) -> list[str]:
        """The command in the home folder, among the desktop's programs; raises `DeviceError` if its server ended."""
        try:
            if self._server is None:
                raise ProcessLookupError("it was stopped")
            join = join_sandbox(self._server.command_pid()) if can_sandbox() else []
        except ProcessLookupError as error:
            raise DeviceError(f"expected a desktop whose X server runs, got none: {error}") from None
        return [*join, *self._at_home(command)]

    def _at_home(self, command: Sequence[str]) -> list[str]:
        return self._user.command(["env", "-C", str(self._shown_home), *command])

    def _owned(self, argv: Sequence[str], name: str) -> OwnedProcess:
        return OwnedProcess(
            argv,
            name=f"{self._folder.name}-{name}",
            log_path=self._logs / f"{name}.log",
            environment=self._environment(),
            stop_timeout_s=1.0,
            claim=self._user,
        )

    def _environment(self) -> dict[str, str]:
        """A minimal environment; the controller's holds API keys."""
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self._shown_home),
            "XDG_RUNTIME_DIR": str(self._shown_home / ".runtime"),
            "TMPDIR": str(self._shown_home / ".tmp"),
            "DISPLAY": self.display,
            "XAUTHORITY": str(self.authority),
            "LANG": "C.UTF-8",
            "XDG_CONFIG_DIRS": f"{self._settings}:/etc/xdg",
            "NO_AT_BRIDGE": "1",  # GTK programs would wait for an accessibility bus
            "GSETTINGS_BACKEND": "memory",  # no settings daemon either
        }

    def _make_folders(self) -> None:
        take_socket_folder(_SOCKETS)
        self._folder.mkdir(mode=0o711)  # the desktop's user passes through it
        self._logs.mkdir(mode=0o700)
        self.files.make()
        self._user.make_folder(self._settings)
        self._user.make_folder(self._temporary)
        self.authority.write_bytes(_access_by_cookie(secrets.token_bytes(16)))
        for path in (self.authority, *(Path(shutil.copy(path, self._settings)) for path in _SETTINGS)):
            path.chmod(0o600)
            self._user.give(path)
        (self._settings / "gtk-3.0").symlink_to(".")  # where GTK looks for settings.ini


def take_socket_folder(folder: Path) -> None:
    """Make the folder of X sockets, or check that it is root's or ours: its owner may replace the sockets of others.

    Run by root, it becomes root's: made by an X server, it is a desktop's.

    Raises:
        ConfigError: another user made it, or put something else there.
    """
    with suppress(FileExistsError):
        folder.mkdir()
    try:
        # not by its name: its maker may meanwhile put a link to another folder there
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _not_ours(folder, str(error)) from None
    try:
        if can_change_user():
            os.fchown(descriptor, 0, 0)
        found, named = os.fstat(descriptor), folder.lstat()
        if found.st_uid not in (0, os.geteuid()) or (found.st_dev, found.st_ino) != (named.st_dev, named.st_ino):
            raise _not_ours(folder, f"one of user {named.st_uid}")
        if found.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o1777)
    finally:
        os.close(descriptor)


def _not_ours(folder: Path, got: str) -> ConfigError:
    return ConfigError(f"expected a folder of root or of this user at {str(folder)!r}, got {got}; let root remove it")


def remove_stale_lock(path: Path) -> None:
    """Remove the lock of a display if it is ours and the process in it has ended: a killed run left it."""
    with suppress(OSError, ValueError):
        # others may put there what never ends
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as lock:
            found = os.fstat(descriptor)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and not is_running(int(lock.read(20))):
                path.unlink()


def _reserve_display() -> int:
    """A free display, which our lock file, in the format of X servers, reserves."""
    for number in _DISPLAYS:
        path = _lock_path(number)
        remove_stale_lock(path)
        if os.path.lexists(_SOCKETS / f"X{number}"):
            continue
        with suppress(FileExistsError), path.open("x") as lock:
            lock.write(f"{os.getpid():10d}\n")
            return number
    raise DeviceError(f"expected a free X display between {_DISPLAYS[0]} and {_DISPLAYS[-1]}, got none; see {_SOCKETS}")


def _lock_path(number: int) -> Path:
    return Path(f"/tmp/.X{number}-lock")


def _access_by_cookie(cookie: bytes) -> bytes:
    """An Xauthority file for every display: C libraries take the wild entry, python-xlib the one with our host."""
    file = b""
    for family, host in ((_FAMILY_WILD, b""), (_FAMILY_LOCAL, socket.gethostname().encode())):
        file += struct.pack(">H", family)
        for field in (host, b"", _COOKIE_NAME, cookie):
            file += struct.pack(">H", len(field)) + field
    return file


def _close_to_others(path: Path, user: SystemUser) -> None:
    """Let no one else connect to an X server, whose socket is open to all; raises `DeviceError` if it is another's."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        owner = os.geteuid() if user.uid is None else user.uid
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != owner:
            raise DeviceError(f"expected a socket of user {owner} at {str(path)!r}, got one of user {found.st_uid}")
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)
