"""The temporary folder of a process, for sockets and logs: removed when the process ends, or by a later process.

The owner holds a lock on a file in the folder. A later process that gets the lock knows that the owner is dead. It ends
child processes that were left because their guards were killed, too, and removes the folder.
"""

import atexit
import fcntl
import os
import signal
import tempfile
import threading
from contextlib import suppress
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import BinaryIO

from cua_rl.host.users import remove_tree

MARK = "CUA_RL_SCRATCH"
"""The variable with the folder's path in the environment of every child process of its owner."""
_PREFIX = "cua_rl-"
_LOCK = ".lock"
_numbers = count(1)
_making = threading.Lock()


def scratch_folder() -> Path:
    """The folder of this process; the first call may block for some milliseconds."""
    with _making:  # the cache alone would let two threads make one each, and the lock and folder of one would be lost
        return _make(os.getpid())[0]


def make_scratch_folder(name: str) -> Path:
    """A new private folder inside it, with a short name, because paths of sockets have a limit."""
    path = scratch_folder() / f"{name}{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove and return our user's folders of dead owners, except those whose guards are still running."""
    removed: list[Path] = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed by another process, or owned by another user
            found = folder.lstat()
            if folder.is_symlink() or found.st_uid != os.geteuid() or not (folder / _LOCK).is_file():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _end_orphans(folder):
                    remove_tree(folder)
                    removed.append(folder)
    return removed


@cache
def _make(pid: int) -> tuple[Path, BinaryIO]:
    """Folder and lock of a process, cached by process id, so that a fork gets its own."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    if os.geteuid() == 0:
        folder.chmod(0o711)  # services with other users can enter it, but not list it
    aside = folder / f"{_LOCK}.new"
    # private: anyone who can open it can lock it, and keep the folder from being removed
    lock = os.fdopen(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    aside.rename(folder / _LOCK)  # visible to others only once it is locked
    atexit.register(_remove_own, folder, pid)
    return folder, lock


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked
        remove_tree(folder)


def _end_orphans(folder: Path) -> bool:
    """Kill the dead owner's child processes that have no guard; False if a guard is still running."""
    marked = [pid for pid in _processes() if _has_mark(pid, folder)]
    guards = {pid for pid in marked if _guard_arguments(pid)}
    for pid in marked:
        if not guards & {pid, *_ancestors(pid)}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return not guards


def _processes() -> list[int]:
    """Ids of all processes; empty without /proc, where ending them is left to the guards."""
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _has_mark(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        if guard := _guard_arguments(pid):  # its environment may be closed to us, and its command may name any folder
            lifeline, _, *rest = guard
            options = takewhile(lambda word: word.startswith("--"), rest)
            return lifeline.startswith(f"{folder}/") or f"--scratch={folder}" in options
        return f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _guard_arguments(pid: int) -> list[str]:
    """What a guard of our user was started with: lifeline, time limit, options, command; empty for other processes."""
    with suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():  # a program of another user may have this name
            words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
            for index, word in enumerate(words[:4]):
                if word.endswith("process_guard.py"):
                    return words[index + 1 :]
    return []


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            found.append(pid)
    return found
