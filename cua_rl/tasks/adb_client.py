"""A blocking view of a device's shell, for validators and pre-hooks that are plain functions."""

import asyncio
import re
from shlex import quote

from cua_rl.environments.device import ShellDevice


class AdbClient:
    """The device as plain functions of a folder get it: they run in a thread, the device belongs to the event loop."""

    def __init__(self, device: ShellDevice, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 60.0) -> None:
        self._device = device
        self._loop = loop
        self._timeout_s = timeout_s

    def shell(self, command: str) -> str:
        """The output of a command on the device, without the last newline."""
        future = asyncio.run_coroutine_threadsafe(self._device.shell(command), self._loop)
        return future.result(self._timeout_s).rstrip("\n")

    def setting(self, namespace: str, key: str) -> str:
        """A value of `settings get`, such as setting("system", "screen_brightness"); "null" if it was never set."""
        return self.shell(f"settings get {quote(namespace)} {quote(key)}").strip()

    def is_installed(self, package: str) -> bool:
        return f"package:{package}" in self.shell(f"pm list packages {quote(package)}").split()

    def exists(self, path: str) -> bool:
        return self.shell(f"test -e {quote(path)} && echo yes").strip() == "yes"

    def current_app(self) -> str:
        """The package in the foreground; "" if nothing has the focus."""
        found = re.search(r"mCurrentFocus=Window\{\S+ \S+ ([\w.]+)/", self.shell("dumpsys window"))
        return found[1] if found else ""

    def run_sqlite_query(self, package: str, database_path: str, sql: str) -> str:
        """The output of an SQL query on an app's database: a line per row, columns separated by |."""
        return self.shell(f"run-as {quote(package)} sqlite3 {quote(database_path)} {quote(sql)}")
