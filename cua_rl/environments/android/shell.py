"""The shell of an Android phone: a protocol, `adb` as one implementation, any device with a shell as another."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cua_rl.environments.device import ShellDevice
from cua_rl.types.errors import ConfigError, DeviceError, DeviceLostError, DeviceTimeoutError


class AndroidShell(Protocol):
    """Runs commands on a phone."""

    async def run(self, command: str) -> str:
        """Run one line of shell on the phone and return what it printed, whatever its exit status.

        Raises `DeviceError` if the phone is gone or slow, or the command did not run to its end.
        """
        ...


class AndroidConnection(AndroidShell, Protocol):
    """A shell that also takes screenshots."""

    async def screenshot(self) -> bytes:
        """What the phone's `screencap -p` writes: a PNG, possibly after a warning."""
        ...

    async def install(self, apk: Path) -> None:
        """Install an app from a file of this machine, over an older version; raises `DeviceError`."""
        ...

    async def load_snapshot(self, name: str) -> None:
        """Bring an emulator back to what it was when the snapshot was saved; raises `DeviceError`."""
        ...


class DeviceShell:
    """The shell of an Android device that is reached in another way than through adb."""

    def __init__(self, device: ShellDevice) -> None:
        self._device = device

    async def run(self, command: str) -> str:
        """Run one line of shell; raises `DeviceError`."""
        return await self._device.shell(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    status: int
    stdout: bytes
    stderr: str


_INSTALL_TIMEOUT_S = 300.0  # also for snapshots
_END = "cua_rl_exit_status="
"""Printed after every command: if it is missing, the connection broke and the output may be truncated."""


class AdbShell:
    """One attached phone. The command line is passed to the phone's shell unquoted: quote untrusted input."""

    def __init__(self, serial: str, *, adb: str = "adb", timeout_s: float = 30.0) -> None:
        self.serial = serial
        self._adb = adb
        self._timeout_s = timeout_s

    async def run(self, command: str) -> str:
        """Run one line of shell: its output, and its error output if it fails.

        Raises `DeviceError`, and `ConfigError` without adb.
        """
        result = await self._call("shell", f"(\n{command}\n); echo {_END}$?")
        output, end, status = result.stdout.decode("utf-8", errors="replace").replace("\r\n", "\n").rpartition(_END)
        if not end:
            raise _failure(self.serial, command, result)
        return output if status.strip() == "0" else output + result.stderr

    async def screenshot(self) -> bytes:
        """Fetch what `screencap -p` writes; raises `DeviceError`."""
        result = await self._call("exec-out", "screencap", "-p")
        if result.status != 0:
            raise _failure(self.serial, "screencap -p", result)
        return result.stdout

    async def install(self, apk: Path) -> None:
        """Install an app, over an older version and with the permissions that it asks for; raises `DeviceError`."""
        result = await self._call("install", "-r", "-g", str(apk), timeout_s=_INSTALL_TIMEOUT_S)
        if result.status != 0:
            raise _failure(self.serial, f"install {apk.name}", result)

    async def load_snapshot(self, name: str) -> None:
        """Load a snapshot through the emulator's console, which answers OK or KO; raises `DeviceError`."""
        result = await self._call("emu", "avd", "snapshot", "load", name, timeout_s=_INSTALL_TIMEOUT_S)
        if result.status != 0 or not result.stdout.strip().endswith(b"OK"):
            raise _failure(self.serial, f"emu avd snapshot load {name}", result)
        result = await self._call("wait-for-device")  # its connection breaks while it is loaded
        if result.status != 0:
            raise _failure(self.serial, "wait-for-device", result)

    async def _call(self, *arguments: str, timeout_s: float | None = None) -> _Result:
        return await _run_adb((self._adb, "-s", self.serial, *arguments), timeout_s or self._timeout_s)


async def list_adb_devices(*, adb: str = "adb", timeout_s: float = 30.0) -> dict[str, str]:
    """Serials of the attached phones and their states, "device" if one can be used.

    Raises `DeviceError` if adb fails, `ConfigError` if there is no adb.
    """
    result = await _run_adb((adb, "devices"), timeout_s)
    if result.status != 0:
        raise DeviceError(f"expected `adb devices` to succeed, got status {result.status}: {result.stderr.strip()!r}")
    return parse_adb_devices(result.stdout.decode("utf-8", errors="replace"))


def parse_adb_devices(text: str) -> dict[str, str]:
    """Parse `adb devices`: a title, then a serial, a tab and a state a line; raises `DeviceError`."""
    _, title, rows = text.replace("\r\n", "\n").partition("List of devices attached\n")
    if not title:
        raise DeviceError(f"expected 'List of devices attached' from `adb devices`, got {text[:200]!r}")
    pairs = (row.split("\t", 1) for row in rows.splitlines() if "\t" in row)
    return {serial: state.strip() for serial, state in pairs}


async def _run_adb(command: Sequence[str], timeout_s: float) -> _Result:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(
            f"expected the command {command[0]!r} to operate Android phones, got {error.strerror!r}; install Android's "
            "platform-tools and put adb on the PATH"
        ) from error
    except OSError as error:  # no process or memory is left at this moment
        raise DeviceError(f"cannot start {command[0]!r}: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise DeviceTimeoutError(f"expected `{' '.join(command)}` to end within {timeout_s:g} s, it did not") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # wait() would never return while a pipe is full
    return _Result(status=process.returncode or 0, stdout=stdout, stderr=stderr.decode("utf-8", errors="replace"))


_ADVICE = (
    ("unauthorized", "accept the debugging prompt on the phone's screen"),
    ("offline", "wait for the phone to boot, or unplug it and plug it in again"),
    ("not found", "attach the phone and look at `adb devices`"),
    ("no devices", "attach the phone and look at `adb devices`"),
)


def _failure(serial: str, command: str, result: _Result) -> DeviceError:
    """The fault, with advice; a phone that adb cannot reach is lost."""
    said = result.stderr.strip() or result.stdout[-300:].decode("utf-8", errors="replace").strip()
    advice = next((hint for sign, hint in _ADVICE if sign in result.stderr), None)
    kind = DeviceError if advice is None else DeviceLostError
    return kind(
        f"expected the phone {serial!r} to run {command!r}, got status {result.status} and {said!r}; "
        f"{advice or 'look at `adb devices`'}"
    )
