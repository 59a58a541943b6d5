"""The temporary folder of a process, for sockets and the like: removed when the process ends, or by the next one.

The owner holds a lock on a file in the folder. Whoever starts later and gets the lock knows that the owner is dead: it
ends what the owner's guards could not end, because they were killed too, and removes the folder.
"""

import atexit
import fcntl
import os
import signal
import tempfile
import threading
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import BinaryIO

from cua_rl.system_users import remove_tree

MARK = "CUA_RL_SCRATCH"
"""The variable that names the folder in the environment of every program that its owner starts."""
_PREFIX = "cua_rl-"
_LOCK = ".lock"
_numbers = count(1)
_making = threading.Lock()


def scratch_folder() -> Path:
    """This process's folder; may block for some milliseconds when it is made."""
    with _making:  # the cache lets two threads make one each: the lock of one would go, and with it the folder
        return _make(os.getpid())[0]


def make_scratch_folder(name: str) -> Path:
    """A new folder in it that others cannot look into; the name is short, because paths of sockets have a limit."""
    path = scratch_folder() / f"{name}{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders of our user whose owners are dead; one whose guards are still at work stays. Returns them."""
    removed: list[Path] = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process was faster, or its owner is not us
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
    """Folder and lock of this process; its number makes a forked one get its own."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    if os.geteuid() == 0:
        folder.chmod(0o711)  # services with users of their own reach what is theirs in it, if they know its name
    aside = folder / f"{_LOCK}.new"
    # whoever may open it may lock it: the folder would stay for ever, or we would wait here
    lock = os.fdopen(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    aside.rename(folder / _LOCK)  # a lock that others can see is held
    atexit.register(_remove_own, folder, pid)
    return folder, lock


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked
        remove_tree(folder)


def _end_orphans(folder: Path) -> bool:
    """Kill what the folder's dead owner started and no guard is ending; False if a guard still works at it."""
    marked = [pid for pid in _processes() if _has_mark(pid, folder)]
    guards = {pid for pid in marked if _is_guard(pid)}
    for pid in marked:
        if not guards & {pid, *_ancestors(pid)}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return not guards


def _processes() -> list[int]:
    """All process numbers; none where there is no /proc, and guards alone must do."""
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _has_mark(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _is_guard(pid: int) -> bool:
    with suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # another user's program may call itself that
            return False
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return any(word.endswith(b"process_guard.py") for word in words[:4])
    return False


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            found.append(pid)
    return found
