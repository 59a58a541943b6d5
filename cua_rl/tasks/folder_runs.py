"""Running a folder's pre-hook and validator on a leased device."""

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote
from typing import Any

from cua_rl.devices.device import AppDevice, Device, ShellDevice
from cua_rl.errors import TaskError
from cua_rl.tasks.adb_client import AdbClient
from cua_rl.types import Validation

Hook = Callable[..., Any]
"""A function of a folder, plain or async: (adb) or (adb, answer)."""

_GO_HOME = "input keyevent KEYCODE_WAKEUP; wm dismiss-keyguard; input keyevent KEYCODE_HOME"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApkConfig:
    """The app that a task needs on the device."""

    app_name: str = ""
    cua_guide: str = ""
    """Told to the agent after the task's description."""
    requires_apk: bool = False
    apk_url: str = ""
    package_name: str = ""
    launch_after_install: bool = False
    main_activity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderParts:
    """What a folder contributes beside its description."""

    task_id: str
    validate: Hook
    pre_hook: Hook | None = None
    apk: ApkConfig | None = None


async def prepare_folder_task(parts: FolderParts, device: Device) -> None:
    """Go to the home screen, check the app, run the pre-hook, see that the task is not done yet; raises `TaskError`."""
    shell = _require_shell(parts, device)
    if device.kind == "android":
        await shell.shell(_GO_HOME)
    if parts.apk is not None:
        await _prepare_app(parts.task_id, parts.apk, shell)
    if parts.pre_hook is not None:
        await _call(parts.pre_hook, shell)
    if await _is_valid(parts, shell, answer=None):
        raise TaskError(
            f"expected task {parts.task_id!r} to be undone when it begins, got a validator that says True already; "
            "add a pre-hook that undoes it"
        )


async def validate_folder_task(parts: FolderParts, device: Device, answer: str | None) -> Validation:
    """Ask the folder's validator."""
    started = time.monotonic()
    success = await _is_valid(parts, _require_shell(parts, device), answer)
    return Validation(
        query=f"{parts.task_id}/validator.py",
        expected="true",
        actual="true" if success else "false",
        success=success,
        duration_s=time.monotonic() - started,
    )


def _require_shell(parts: FolderParts, device: Device) -> ShellDevice:
    if not isinstance(device, ShellDevice):
        raise TaskError(
            f"expected a device with a shell for task {parts.task_id!r}, got {device.device_id!r}; use an "
            "Android device"
        )
    return device


async def _prepare_app(task_id: str, apk: ApkConfig, device: ShellDevice) -> None:
    package = apk.package_name
    if apk.requires_apk and not await _is_installed(package, device):
        if apk.apk_url and isinstance(device, AppDevice):
            await device.install_app(apk.apk_url)
        if not await _is_installed(package, device):
            raise TaskError(_not_installed(task_id, apk))
    if apk.launch_after_install and apk.main_activity:
        await device.shell(f"am start -n {quote(f'{package}/{apk.main_activity}')}")
    elif apk.launch_after_install:
        await device.shell(f"monkey -p {quote(package)} -c android.intent.category.LAUNCHER 1")


async def _is_installed(package: str, device: ShellDevice) -> bool:
    return f"package:{package}" in (await device.shell(f"pm list packages {quote(package)}")).split()


def _not_installed(task_id: str, apk: ApkConfig) -> str:
    origin = f" from {apk.apk_url}" if apk.apk_url else ""
    return f"expected {apk.package_name!r} on the device for task {task_id!r}, got none; install it first{origin}"


async def _is_valid(parts: FolderParts, device: ShellDevice, answer: str | None) -> bool:
    takes_answer = len(inspect.signature(parts.validate).parameters) > 1
    outcome = await _call(parts.validate, device, *([answer or ""] if takes_answer else []))
    if not isinstance(outcome, bool):
        raise TaskError(f"expected True or False from the validator of {parts.task_id!r}, got {outcome!r}; return one")
    return outcome


async def _call(hook: Hook, device: ShellDevice, *arguments: str) -> object:
    """Async functions run here and get the device; plain ones may block, so they run in a thread."""
    if inspect.iscoroutinefunction(hook):
        return await hook(device, *arguments)
    return await asyncio.to_thread(hook, AdbClient(device, asyncio.get_running_loop()), *arguments)
