"""Attackers: a user who has nothing to do with a run, and what a debugger tries."""

import ctypes
import os
import pwd
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import psycopg

from cua_rl.host.users import GUEST_UIDS, processes_of
from cua_rl.types.errors import CuaError, boundary

_PTRACE_SEIZE = 0x4206  # linux/ptrace.h
_PR_SET_DUMPABLE = 4  # linux/prctl.h


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


_REFUSALS = (OSError, psycopg.Error)
"""What an attack meets where it gets nothing; anything else is a fault of the attack."""


def as_user(uid: int, attack: Callable[[], str]) -> str:
    """What the attack says in a process of this user, without any privilege; "refused: ..." if it gets nothing.

    Raises:
        CuaError: it broke off for another reason.
    """
    "localhost".encode("idna")  # sockets load this codec when they need it, perhaps from where the user cannot read
    read_end, write_end = os.pipe()
    child = os.fork()  # no exec: this Python may lie where the user cannot read
    if child == 0:
        os.close(read_end)
        said, status = "it ended", 1
        try:
            with boundary(CuaError, "broke off"):
                said = _as_this_user(uid, attack)
                status = 0
        except CuaError as error:
            said = str(error)
        finally:  # whatever comes, this process does not go on with the work of its parent
            os.write(write_end, said.encode(errors="replace")[:4000])
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        said = answer.read().decode(errors="replace")
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise CuaError(f"expected an answer or a refusal of an attack, got status {status}: {said}")
    return said


def _as_this_user(uid: int, attack: Callable[[], str]) -> str:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.chdir("/")
    try:
        return attack()
    except _REFUSALS as error:
        return f"refused: {type(error).__name__}: {error}"


def allow_inspection() -> None:
    """Let programs of our own user debug this process, as they may until it refuses."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


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
