"""Reading the state of a Linux box by name, through its shell."""

from collections.abc import Awaitable, Callable, Mapping
from shlex import quote

from cua_rl.devices.device import ShellDevice
from cua_rl.errors import DeviceError, TaskError

_YES, _NO = "cua_rl:true", "cua_rl:false"


async def read_linux_query(device: ShellDevice, name: str) -> str:
    """Read "file_exists:/a", "file_text:/a" ("" without such a file) or "app_running:firefox"; raises `TaskError`."""
    base, _, argument = name.partition(":")
    read = LINUX_QUERIES.get(base)
    if read is None or not argument:
        known = ", ".join(f"{query}:..." for query in sorted(LINUX_QUERIES))
        raise TaskError(f"expected a query that a Linux box answers, got {name!r}; choose one of {known}")
    return await read(device, argument)


async def _test(device: ShellDevice, condition: str) -> str:
    said = (await device.shell(f"if {condition}; then echo {_YES}; else echo {_NO}; fi")).strip()
    if said not in (_YES, _NO):
        raise DeviceError(f"expected {_YES} or {_NO} from {device.device_id!r}, got {said[:200]!r}")
    return said.removeprefix("cua_rl:")


async def _file_exists(device: ShellDevice, path: str) -> str:
    return await _test(device, f"test -e {quote(path)}")


async def _file_text(device: ShellDevice, path: str) -> str:
    if await _file_exists(device, path) == "false":
        return ""
    return (await device.shell(f"cat {quote(path)}")).removesuffix("\n")


async def _app_running(device: ShellDevice, program: str) -> str:
    return await _test(device, f"pgrep -x {quote(program)} >/dev/null")


LINUX_QUERIES: Mapping[str, Callable[[ShellDevice, str], Awaitable[str]]] = {
    "file_exists": _file_exists,
    "file_text": _file_text,
    "app_running": _app_running,
}
