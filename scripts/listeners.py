"""Every address that the processes of a run listen on, what locks it, and what another local user gets there.

    python -m scripts.listeners 4711    # the process of a run; as root, another user really tries

Ends with status 1 if one listens beyond this machine, or answers a stranger, or could not be asked. The monitor may
answer: it shows, and changes nothing, on the loopback address.
"""

import argparse
import json
import os
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import psutil

from scripts.red_team.users import STRANGER_UID, as_user

_LISTENS = 0x10000  # the flag __SO_ACCEPTCON in /proc/net/unix
_TIMEOUT_S = 1.0
_QUESTION = b"GET /v1/models HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that waits for connections, or, for UDP, for datagrams."""

    pid: int
    program: str
    kind: str
    """tcp, udp or unix."""
    address: str
    """HOST:PORT, a path, or a name in the abstract namespace, which begins with @."""

    @property
    def is_local(self) -> bool:
        """Whether other machines cannot reach it."""
        if self.kind == "unix":
            return True
        host = ip_address(self.address.rpartition(":")[0])
        mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None  # as servers of IPv6 name IPv4 peers
        return (mapped or host).is_loopback

    @property
    def is_monitor(self) -> bool:
        """Whether it is the page that anybody on this machine may read."""
        return "serve_monitor" in self.program and self.kind == "tcp"

    @property
    def lock(self) -> str:
        """What keeps other users out before a byte is exchanged."""
        if self.kind != "unix":
            return "none: it has to ask for a secret"
        if self.address.startswith("@"):
            return "none: names of the abstract namespace have no owner"
        for path in (Path(self.address), *Path(self.address).parents):
            found = path.stat()
            needed = stat.S_IWOTH if stat.S_ISSOCK(found.st_mode) else stat.S_IXOTH
            if not found.st_mode & needed:
                return f"mode {found.st_mode & 0o777:o} of {path}, which belongs to user {found.st_uid}"
        return "none"


def list_listeners(pid: int) -> list[Listener]:
    """What a process and its descendants listen on, each address once.

    A controller of external agents refuses inspection by its own user: only root sees its listener.
    """
    waiting = _listening_paths()
    found: dict[tuple[str, str], Listener] = {}
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            program = " ".join(process.cmdline())
            for link in process.net_connections("all"):
                kind, address = _address(link.type, link.laddr)
                is_waiting = kind == "udp" or link.status == psutil.CONN_LISTEN or address in waiting
                if address and is_waiting:
                    one = Listener(pid=process.pid, program=program, kind=kind, address=address)
                    found.setdefault((kind, address), one)
    return list(found.values())


def answer_to_stranger(listener: Listener) -> str:
    """What a client without a secret gets: "refused: ...", or the beginning of the answer ("" for none).

    Root asks as another user. Anyone else cannot: then a file that is closed to others counts as a refusal.

    Raises:
        CuaError: the attempt failed for another reason.
    """
    if os.geteuid() != 0 and listener.kind == "unix" and not listener.lock.startswith("none"):
        return "refused: not tried"
    return as_user(STRANGER_UID if os.geteuid() == 0 else os.geteuid(), lambda: _ask(listener))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object per listener."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    rows = [
        {
            "program": listener.program[:60],
            "kind": listener.kind,
            "address": listener.address,
            "lock": listener.lock,
            "stranger": answer,
            "is_open": not listener.is_local or (gave_something(answer) and not listener.is_monitor),
        }
        for listener in list_listeners(parser.parse_args(arguments).pid)
        for answer in [answer_to_stranger(listener)]
    ]
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    return int(any(row["is_open"] for row in rows))


def gave_something(answer: str) -> bool:
    """Whether it is more than a refusal."""
    words = answer.split()
    is_refusal = len(words) > 1 and words[0].startswith("HTTP/") and words[1] >= "400"
    return bool(words) and not is_refusal and words[0] != "refused:"


def _listening_paths() -> set[str]:
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS}


def _address(kind: int, local: Any) -> tuple[str, str]:
    """Kind and address as a listener has them; `local` is a path, a pair of host and port, or empty."""
    if isinstance(local, str):
        return "unix", local.replace("\0", "@")
    return "udp" if kind == socket.SOCK_DGRAM else "tcp", f"{local[0]}:{local[1]}" if local else ""


def _ask(listener: Listener) -> str:
    if listener.kind == "unix":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(listener.address.replace("@", "\0", 1))
            return _converse(connection)
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        return _converse(connection)


def _converse(connection: socket.socket) -> str:
    connection.sendall(_QUESTION)
    with suppress(TimeoutError, ConnectionResetError):
        return connection.recv(100).decode(errors="replace")
    return ""


if __name__ == "__main__":
    sys.exit(main())
