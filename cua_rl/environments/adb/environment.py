"""Attached Android phones and emulators; each serial runs one rollout at a time and is reused."""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from cua_rl.environments.adb.device import ANDROID_ABILITIES, AndroidDevice, build_observation
from cua_rl.environments.android.folders import FolderSource
from cua_rl.environments.android.shell import AdbShell, AndroidConnection, list_adb_devices
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import DeviceOrder, Environment
from cua_rl.environments.device import Device
from cua_rl.environments.pool import DeviceBackend, DeviceRequest
from cua_rl.types.errors import ConfigError, DeviceError, DeviceQuotaError

logger = logging.getLogger(__name__)

_GO_HOME = (
    "input keyevent KEYCODE_WAKEUP; wm dismiss-keyguard; cmd statusbar collapse; "
    "am kill-all; input keyevent KEYCODE_HOME"
)
"""Wakes and unlocks the phone, ends background apps and goes home; settings are left to the tasks."""


class AdbPhones:
    """The `DeviceBackend` of attached phones. Without `serials`, all that adb lists as ready.

    With a `snapshot` all must be emulators, which load it before each rollout.
    """

    def __init__(
        self,
        serials: Sequence[str] = (),
        *,
        snapshot: str | None = None,
        adb: str = "adb",
        connect: Callable[[str], AndroidConnection] | None = None,
    ) -> None:
        self.abilities = replace(ANDROID_ABILITIES, is_repeatable=bool(snapshot))
        self._wanted = tuple(serials)
        self._snapshot = snapshot
        self._adb = adb
        self._connect: Callable[[str], AndroidConnection] = connect or partial(AdbShell, adb=adb)
        self._serials: tuple[str, ...] = ()
        self._free: deque[str] = deque()

    @property
    def num_devices(self) -> int:
        """Phones of this run; 0 before the backend is entered."""
        return len(self._serials)

    async def make(self, request: DeviceRequest) -> Device:
        """An idle phone on its home screen, whose screen has been seen; raises `DeviceError`."""
        if not self._free:
            raise DeviceQuotaError(f"expected a free phone among {', '.join(self._serials)}, all are in use")
        serial = self._free.popleft()
        connection = self._connect(serial)
        try:
            await self._begin(connection)
        except BaseException:
            self._free.append(serial)  # at the end: the next try gets another phone, where there is one
            raise
        return AndroidDevice(connection, device_id=serial, give_back=lambda: self._free.append(serial))

    async def reset(self, device: Device, request: DeviceRequest) -> Device:
        """The same phone at home again; raises `DeviceError` if it does not answer."""
        await self._begin(self._connect(device.device_id))
        return device

    async def __aenter__(self) -> Self:
        try:
            attached = await list_adb_devices(adb=self._adb)
        except DeviceError as error:
            raise ConfigError(f"device: expected adb to list phones for device=adb, got: {error}") from error
        ready = [serial for serial, state in attached.items() if state == "device"]
        others = {serial: state for serial, state in attached.items() if state != "device"}
        missing = [serial for serial in self._wanted if serial not in ready]
        if missing or not ready:
            raise ConfigError(
                f"adb_serials: expected attached phones{': ' + ', '.join(missing) if missing else ''}, got "
                f"{', '.join(ready) or 'none'} ready and {others or 'none'} not ready; attach them, accept the "
                "debugging prompt, look at `adb devices`"
            )
        self._serials = self._wanted or tuple(ready)
        for serial in self._serials:
            try:
                await self._load(self._connect(serial))
            except DeviceError as error:
                raise ConfigError(
                    f"adb_snapshot: expected emulators that load {self._snapshot!r}, got: {error}; save it: adb -s "
                    f"{serial} emu avd snapshot save {self._snapshot}"
                ) from error
        self._free = deque(self._serials)
        logger.info("phones: %s", ", ".join(self._serials))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._free.clear()

    async def _begin(self, connection: AndroidConnection) -> None:
        await self._load(connection)
        await connection.run(_GO_HOME)
        build_observation(await connection.screenshot())

    async def _load(self, connection: AndroidConnection) -> None:
        if self._snapshot:
            await connection.load_snapshot(self._snapshot)


def _check_settings(order: DeviceOrder) -> None:
    given = {"adb_serials": list(order.settings.adb_serials), "adb_snapshot": order.settings.adb_snapshot}
    for name, value in given.items():
        if value and order.device != "adb":
            raise ConfigError(f"{name}: expected it only with device=adb, got {value!r}; leave it out")


def _check_workers(num_workers: int, settings: DeviceConfig) -> None:
    if num_workers > 1:
        raise ConfigError(
            "rollout_workers: expected at most 1 with device=adb, whose phones belong to one process, got "
            f"{num_workers}; leave it out"
        )


def _make_backend(order: DeviceOrder) -> DeviceBackend:
    if shutil.which("adb") is None:
        raise ConfigError(
            "device: expected the program adb on the PATH for device=adb, got none; install the Android platform "
            "tools (Debian and Ubuntu: apt-get install adb)"
        )
    return AdbPhones(order.settings.adb_serials, snapshot=order.settings.adb_snapshot)


ADB = Environment(
    name="adb",
    sources=(FolderSource,),  # of tasks for every device with a shell
    is_configured=True,
    make_backend=_make_backend,
    check_settings=_check_settings,
    check_workers=_check_workers,
)
