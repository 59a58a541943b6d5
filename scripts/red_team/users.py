"""Attackers: a user who has nothing to do with a run, and what a debugger tries."""

import ctypes
import os
import pwd
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from cua_rl.errors import CuaError, boundary
from cua_rl.system_users import GUEST_UIDS, processes_of

_PTRACE_SEIZE = 0x4206  # linux/ptrace.h


def _unused_uid() -> int:
    """A number after those that programs of a run get, without a name and without processes."""
    for uid in count(GUEST_UIDS.stop):
        with suppress(KeyError):
            pwd.getpwuid(uid)
            continue
        if not processes_of(uid):
            return uid
    raise AssertionError("numbers do not end")


STRANGER_UID = _unused_uid()
"""Another user of the machine."""


@contextmanager
def _no_refusal(kind: type[Exception]) -> Generator[None]:
    """What an attack meets of its own, which nobody has refused."""
    try:
        yield
    except kind as error:
        raise CuaError(f"broke off: {error!r}") from error


def as_user(uid: int, attack: Callable[[], str]) -> str:
    """What the attack says in a process of this user, without any privilege; "refused: ..." if it raises."""
    read_end, write_end = os.pipe()
    child = os.fork()  # no exec: this Python may lie where the user cannot read
    if child == 0:
        os.close(read_end)
        try:
            with boundary(CuaError, "refused"), _no_refusal(ImportError):
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setresgid(uid, uid, uid)
                    os.setresuid(uid, uid, uid)
                os.chdir("/")
                said = attack()
        except CuaError as error:
            said = str(error)
        os.write(write_end, said.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def inspect(pid: int) -> str:
    """What this process gets of another one as a debugger does; raises if it gets nothing."""
    got: list[str] = []
    with suppress(OSError):
        got += ["its environment"] if Path(f"/proc/{pid}/environ").read_bytes() else []
    with suppress(OSError):
        with open(f"/proc/{pid}/mem", "rb"):
            got.append("its memory")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) == 0:  # let go when this process ends
        got.append("control")
    if not got:
        raise PermissionError("neither environment nor memory nor control")
    return f"got {', '.join(got)}"
