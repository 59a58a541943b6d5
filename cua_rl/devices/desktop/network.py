"""A network of a desktop's own: its programs reach one another through loopback, and nothing outside."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Self

from cua_rl.system_users import SystemUser, can_change_user

logger = logging.getLogger(__name__)

_WITH_LOOPBACK = (  # SIOCSIFFLAGS with IFF_UP and IFF_RUNNING; `ip` is not installed everywhere
    "import fcntl, os, socket, struct, sys; "
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0x41)); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Network:
    """The network of a program that was started by `with_new_network`; it lasts as long as this or a program in it."""

    _namespaces: tuple[BinaryIO, ...] = ()

    @classmethod
    def of(cls, pid: int) -> Self:
        """The network of this process; the machine's if the kernel permits no other."""
        if not can_isolate():
            return cls()
        names = ("net",) if can_change_user() else ("user", "net")
        return cls(tuple(Path(f"/proc/{pid}/ns/{name}").open("rb") for name in names))

    def command(self, command: Sequence[str], user: SystemUser) -> list[str]:
        """The command, run by the user in this network."""
        if not self._namespaces:
            return user.command(command)
        paths = [f"/proc/{os.getpid()}/fd/{namespace.fileno()}" for namespace in self._namespaces]
        if len(paths) == 1:
            return ["nsenter", f"--net={paths[0]}", "--", *user.command(command)]
        joined = [f"--user={paths[0]}", f"--net={paths[1]}", "--preserve-credentials"]
        return ["nsenter", *joined, "--", *user.command(command)]

    def close(self) -> None:
        """Forget the network; safe to call twice."""
        for namespace in self._namespaces:
            namespace.close()


def with_new_network(command: Sequence[str], user: SystemUser) -> list[str]:
    """The command, run by the user in a new network with nothing but loopback, where the kernel permits it."""
    return _isolated(command, user) if can_isolate() else user.command(command)


@cache
def can_isolate() -> bool:
    """Whether desktops can have networks of their own; the log says so once if not."""
    try:
        done = subprocess.run(_isolated(["true"], SystemUser()), capture_output=True, text=True, check=False, cwd="/")
    except FileNotFoundError:
        problem = "there is no unshare"
    else:
        problem = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == 0:
            return True
    logger.warning(
        "programs on Linux desktops can reach this machine's network: the kernel permits no other (%s); in a "
        "container, give it the capability SYS_ADMIN, otherwise permit unprivileged user namespaces",
        problem,
    )
    return False


def _isolated(command: Sequence[str], user: SystemUser) -> list[str]:
    # an ordinary user may do this as root of a namespace of its own; setpriv gives that up
    ours = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", *ours, "--net", "--", sys.executable, "-ISc", _WITH_LOOPBACK, *user.command(command)]
