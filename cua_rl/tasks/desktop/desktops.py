"""Where Linux desktops come from: the `DeviceBackend` of desktop tasks."""

import asyncio
import os
import shutil
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

from cua_rl.devices.desktop.device import DESKTOP_ABILITIES, LinuxDesktop
from cua_rl.devices.desktop.session import DesktopSession, require_programs
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.devices.pool import DeviceRequest
from cua_rl.errors import DeviceError
from cua_rl.system import is_running

_FOLDER = "cua_rl-desktops-{pid}"


class LinuxDesktops:
    """Makes desktops of one size, each with a home of its own below a folder that is named after this process.

    Processes of a crashed run have ended with it; entering removes the folders that it left. Raises `ConfigError` if a
    program that desktops need is missing.
    """

    abilities: DeviceAbilities = DESKTOP_ABILITIES

    def __init__(self, *, width_px: int = 1024, height_px: int = 768) -> None:
        require_programs()
        self._size_px = (width_px, height_px)
        self._folder = Path(tempfile.gettempdir()) / _FOLDER.format(pid=os.getpid())
        self._numbers = count(1)

    async def make(self, request: DeviceRequest) -> Device:
        """A fresh desktop without windows; the task's set-up fills it."""
        name = f"desktop-{next(self._numbers)}"
        width_px, height_px = self._size_px
        desktop = LinuxDesktop(
            DesktopSession(self._folder / name, width_px=width_px, height_px=height_px), device_id=name
        )
        try:
            await desktop.start()
        except BaseException:
            await asyncio.shield(desktop.close())
            raise
        return desktop

    async def reset(self, device: Device, request: DeviceRequest) -> Device:
        """The desktop without programs and files; raises `DeviceError` if it is not healthy."""
        if not isinstance(device, LinuxDesktop):
            raise DeviceError(f"expected a Linux desktop to reset, got {device.device_id!r}")
        await device.reset()
        return device

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(remove_left_folders)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def remove_left_folders() -> None:
    """Remove what processes that live no more left behind."""
    for folder in Path(tempfile.gettempdir()).glob(_FOLDER.format(pid="*")):
        with suppress(ValueError):
            if not is_running(int(folder.name.rpartition("-")[2])):
                shutil.rmtree(folder, ignore_errors=True)
