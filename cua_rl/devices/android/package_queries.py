"""What Android tells about one app; an argument is what follows the colon."""

import json
from shlex import quote

from cua_rl.devices.android.dumps import parse_permissions
from cua_rl.devices.android.readings import parse_packages, parse_process_names, truth
from cua_rl.devices.android.shell import AndroidShell
from cua_rl.errors import TaskError

NOTIFY_PERMISSION = "android.permission.POST_NOTIFICATIONS"
"""Since Android 13 whether an app may notify is one of its permissions."""


async def read_installed_apps(shell: AndroidShell, argument: str) -> str:
    """Every package, Android's own included."""
    return json.dumps(await _packages(shell))


async def read_app_installed(shell: AndroidShell, package: str) -> str:
    """Whether exactly this package is installed."""
    return truth(package in await _packages(shell))


async def read_app_running(shell: AndroidShell, package: str) -> str:
    """Whether the app has a process."""
    names = parse_process_names(await shell.run("ps -A -o NAME"))
    return truth(any(name == package or name.startswith(f"{package}:") for name in names))


async def read_app_permission(shell: AndroidShell, argument: str) -> str:
    """Whether PACKAGE/PERMISSION is granted; not if the app is not there or never asks for it."""
    package, slash, permission = argument.partition("/")
    if not slash:
        raise TaskError(f"expected app_permission:PACKAGE/PERMISSION, got the argument {argument!r}")
    granted = await read_permissions(shell, package)
    return truth(granted is not None and granted.get(full_permission(permission), False))


async def read_app_notifications(shell: AndroidShell, package: str) -> str:
    """Whether the app may post notifications."""
    return await read_app_permission(shell, f"{package}/{NOTIFY_PERMISSION}")


async def read_permissions(shell: AndroidShell, package: str) -> dict[str, bool] | None:
    """Permission -> granted; None if the package is not installed."""
    if package not in await _packages(shell):
        return None
    return parse_permissions(await shell.run(f"dumpsys package {quote(package)}"), package)


def full_permission(name: str) -> str:
    """ "CAMERA" is short for "android.permission.CAMERA"."""
    return name if "." in name else f"android.permission.{name}"


async def _packages(shell: AndroidShell) -> list[str]:
    return parse_packages(await shell.run("pm list packages --user 0"))
