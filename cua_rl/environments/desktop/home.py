"""Reads the home folder of a desktop, where programs may put anything: pipes, links, files that never end.

Nothing that they put there makes a reader wait, leads it out of the folder or fills its memory: what is no ordinary
file of moderate size has no text.
"""

import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cua_rl.host.users import SystemUser
from cua_rl.types.errors import TaskError

MAX_FILE_BYTES = 1 << 20
MAX_NAMES = 10_000
"""Files and folders that are looked at; a listing of more is cut."""
MAX_DEPTH = 32
"""Folders in one another, each of which takes a descriptor while it is listed."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # not waiting for the writer of a pipe


class Home:
    """The folder `path`, whose files belong to `user`. Everything blocks, for as long as a disk takes."""

    def __init__(self, path: Path, user: SystemUser) -> None:
        self.path = path
        self._user = user

    def make(self) -> None:
        """Make it, with what programs expect."""
        for folder in (self.path, self.path / ".runtime", self.path / ".tmp"):
            self._user.make_folder(folder)

    def read_text(self, name: str) -> str:
        """The text of a file, "" if there is no ordinary file of at most `MAX_FILE_BYTES`; no link is followed."""
        try:
            with self._open_parent(name) as (parent, last):
                descriptor = os.open(last, _FILE_FLAGS, dir_fd=parent)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            # a hard link may lead to what belongs to others
            is_theirs = self._user.uid in (None, found.st_uid)
            if not stat.S_ISREG(found.st_mode) or not is_theirs or found.st_size > MAX_FILE_BYTES:
                return ""
            data = file.read(MAX_FILE_BYTES + 1)  # it may grow meanwhile
        # the database stores no NUL
        return data.decode(errors="replace").replace("\0", "\ufffd") if len(data) <= MAX_FILE_BYTES else ""

    def write_text(self, name: str, text: str) -> None:
        """Put a file there in place of whatever has the name."""
        with self._open_parent(name) as (parent, last):
            aside = f".{secrets.token_hex(8)}"
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                if self._user.uid is not None:
                    os.fchown(file.fileno(), self._user.uid, self._user.uid)
            os.rename(aside, last, src_dir_fd=parent, dst_dir_fd=parent)

    def listing(self) -> str:
        """Files and folders (with a slash) that do not begin with a dot, one a line."""
        found: list[tuple[str, ...]] = []
        root = os.open(self.path, _FOLDER_FLAGS)
        try:
            _list(root, (), found)
        finally:
            os.close(root)
        lines = ("/".join(parts) for parts in sorted(found))
        return "\n".join(os.fsencode(line.replace("\n", "\ufffd")).decode(errors="replace") for line in lines)

    @contextmanager
    def _open_parent(self, name: str) -> Generator[tuple[int, str]]:
        """A descriptor of the folder that holds the file, and the file's name in it; raises `TaskError`, `OSError`."""
        path = os.path.relpath(os.path.normpath(self.path / name), self.path)
        *folders, last = Path(path).parts or ("",)
        if not name or "\0" in name or last in ("", "..") or ".." in folders:
            raise TaskError(f"expected a path in the home folder of the desktop, got {name!r}")
        descriptor = os.open(self.path, _FOLDER_FLAGS)
        try:
            for folder in folders:
                inner = os.open(folder, _FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor, last
        finally:
            os.close(descriptor)


def _list(folder: int, above: tuple[str, ...], found: list[tuple[str, ...]]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(found) >= MAX_NAMES:
                return
            if entry.name.startswith("."):
                continue
            if not entry.is_dir(follow_symlinks=False):
                found.append((*above, entry.name))
                continue
            found.append((*above, entry.name, ""))
            if len(above) < MAX_DEPTH:
                try:
                    inner = os.open(entry.name, _FOLDER_FLAGS, dir_fd=folder)
                except OSError:  # it is gone, or closed to us
                    continue
                try:
                    _list(inner, (*above, entry.name), found)
                finally:
                    os.close(inner)
