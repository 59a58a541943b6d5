"""Where Linux desktops come from: the `DeviceBackend` of desktop tasks."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Self

from cua_rl.environments.desktop.device import DESKTOP_ABILITIES, LinuxDesktop
from cua_rl.environments.desktop.session import DesktopSession, require_programs
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.pool import DeviceRequest
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import remove_tree


class LinuxDesktops:
    """Makes desktops of one size, each with its own home and for one lease: programs change more than files.

    Raises `ConfigError` if a program that desktops need is missing.
    """

    abilities: DeviceAbilities = DESKTOP_ABILITIES

    def __init__(self, *, width_px: int = 1024, height_px: int = 768) -> None:
        require_programs()
        self._size_px = (width_px, height_px)
        self._folder: Path | None = None
        self._numbers = count(1)

    async def make(self, request: DeviceRequest) -> Device:
        """A fresh desktop without windows; the task's set-up fills it."""
        if self._folder is None:
            raise RuntimeError("there is no folder for desktops yet; enter the context first")
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

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(make_scratch_folder, "desktops")
        self._folder.chmod(0o711)  # the users of desktops pass through it, and cannot list it
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._folder is not None:
            await asyncio.to_thread(remove_tree, self._folder)
