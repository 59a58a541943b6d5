"""The sandbox of a program that a model or an agent controls, made by bubblewrap (`bwrap`).

It has processes, IPC objects, devices and temporary folders of its own, and sees the system and the files that it is
given; of these it writes to what its user may write. Root, which gives it its own user, and ordinary users start
the same sandbox. Where the kernel permits no namespaces, there are no sandboxes, and the log says so once.
"""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from cua_rl.host.users import problem_of

logger = logging.getLogger(__name__)

_BARE = (
    *("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
    *("--bind", "/", "/", "--proc", "/proc"),
)
_OWN_MEMORY = ("--perms", "1777", "--tmpfs", "/dev/shm")
_DEVICES = ("kvm", "dri", "kfd", "nvidia*")
_PACKAGES = {"pyvenv.cfg", "conda-meta", "site-packages", "node_modules"}
"""Names that mark folders of packages, which are not searched."""
_RUN_LOCK = ".cua_rl.lock"
_TEMPORARY = tuple(Path(name).resolve() for name in ("/tmp", "/var/tmp"))
_SMALL = "1000000"
"""Bytes that a program may write to what covers a folder."""
_MAX_DEPTH = 4
_MAX_NAMES = 1000
"""A folder with more entries holds data, and is shown as it is."""


@cache
def can_sandbox() -> bool:
    """Whether programs can have sandboxes; logs once what remains without them."""
    problem = problem_of([*_BARE, "--dev", "/dev", *_OWN_MEMORY, "--unshare-net", "true"])
    if problem is not None:
        logger.warning(
            "agents, harnesses, browsers, sites and desktops run without sandboxes (%s): they see the machine's "
            "processes and network and, unless root starts the run, the files of your user, and its other users reach "
            "the sites; install bubblewrap and, in a container, permit user namespaces, or give it the capability "
            "SYS_ADMIN (docs/security.md)",
            problem,
        )
    return problem is None


def sandbox(files: Iterable[str], home: Path) -> list[str]:
    """The beginning of a command that runs the rest in a sandbox with `home`, and `home/.tmp` as `/tmp`.

    Of folders that are closed to other users, of ours and of `/tmp`, it shows the entries on the way to these files,
    without names that begin with a dot and folders of runs, unless they lie on the way themselves.
    """
    words = [*_BARE, "--dev", "/dev", *_OWN_MEMORY, *_view(set(_ways(files)), home / ".tmp", home)]
    for device in (path for pattern in _DEVICES for path in Path("/dev").glob(pattern)):
        words += ["--dev-bind-try", str(device), str(device)]
    return [*words, "--"]


def sandbox_to_join(
    files: Iterable[str], temporary: Path, *places: Path, moved: Iterable[tuple[Path, Path]] = ()
) -> list[str]:
    """The beginning of a command that runs the rest in a sandbox without a way out, which writes to these places.

    `moved` are further places, each with the path that it has there. The sandbox has the machine's devices: to join one
    with its own terminals, ordinary users lack the rights.
    """
    view = _view(set(_ways(files)), temporary, *places)
    view += [word for place, path in moved for word in ("--bind", str(place), str(path))]
    return [*_BARE, "--unshare-net", "--dev-bind", "/dev", "/dev", *_OWN_MEMORY, *view, "--"]


def join_sandbox(pid: int, namespaces: str = "mount net pid ipc uts") -> list[str]:
    """The beginning of a command that runs the rest in these namespaces of the sandbox whose `bwrap` has this number.

    Raises:
        ProcessLookupError: it has ended.
    """
    try:
        inner = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (FileNotFoundError, IndexError):
        raise ProcessLookupError(f"the sandbox of process {pid} has ended") from None
    ours = ["--user", "--preserve-credentials"] if os.geteuid() else []
    return ["nsenter", f"--target={inner}", *ours, *(f"--{name}" for name in namespaces.split()), "--"]


def _view(ways: set[Path], temporary: Path, *places: Path) -> list[str]:
    """Covers what is closed to other users and shows what lies on these ways; the places can be written to."""
    covered = {path.resolve() for path in map(Path, ("/root", "/tmp", "/var/tmp", "/run/user", tempfile.gettempdir()))}
    covered = {path for path in (*covered, Path.home().resolve()) if path.is_dir() and path != Path("/")}
    entries: dict[Path, None] = {}
    for way in ways:
        closed = [one for one in way.parents if not one.stat().st_mode & 0o001 or one.resolve() in covered]
        if closed:  # innermost first
            covered |= {one.resolve() for one in closed}
            entries[closed[0].resolve() / way.relative_to(closed[0]).parts[0]] = None
    words: list[str] = []
    for folder in sorted(covered):
        if covered.isdisjoint(folder.parents):
            words += ["--perms", "0711", "--size", _SMALL, "--tmpfs", str(folder)]
    for folder in _TEMPORARY:
        words += ["--bind", str(temporary), str(folder)]
    for place in sorted({parent for path in (*entries, *places) for parent in path.parents}):
        words += ["--dir", str(place)] if not covered.isdisjoint(place.parents) else []  # with the mode of most
    here, on_ways = Path.cwd(), {str(path) for way in ways for path in (way, *way.parents)}
    if here != Path("/") and covered.isdisjoint((here, *here.parents)):
        kept = _kept(str(here), on_ways, _MAX_DEPTH)
        words += [] if kept is None else ["--perms", "0755", "--size", _SMALL, "--tmpfs", str(here), *kept]
    for entry in sorted(entries):
        shown = ["--bind-try", str(entry), str(entry)]
        is_tree = entry.name.startswith(".") or not entry.is_dir()
        words += shown if is_tree else (_kept(str(entry), on_ways, _MAX_DEPTH) or shown)
    return [*words, *(word for place in places for word in ("--bind", str(place), str(place)))]


def _ways(files: Iterable[str]) -> Iterator[Path]:
    """The paths to these files, including the links on the way."""
    for file in filter(os.path.exists, files):
        ways = [Path(file).absolute()]
        while ways[-1].is_symlink():
            ways.append(ways[-1].parent / ways[-1].readlink())
        for way in ways:
            yield Path(os.path.abspath(way))
            yield way.parent.resolve() / way.name


def _kept(folder: str, on_ways: set[str], depth: int) -> list[str] | None:
    """What makes the folder without what is kept back; None if it holds nothing of that kind."""
    names: dict[str, bool] = {}
    # what we cannot read, a guest of ours cannot either; others may remove it meanwhile
    with suppress(PermissionError, FileNotFoundError), os.scandir(folder) as entries:
        names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    if _PACKAGES & names.keys() or len(names) > _MAX_NAMES:
        return None
    words, is_whole = ["--dir", folder], True
    for name, is_folder in names.items():
        path, has_dot = f"{folder}/{name}", name.startswith(".")
        if path not in on_ways and (has_dot or (is_folder and os.path.lexists(f"{path}/{_RUN_LOCK}"))):
            is_whole = False
            continue
        kept = _kept(path, on_ways, depth - 1) if is_folder and depth and not has_dot else None
        is_whole = is_whole and kept is None
        words += ["--bind-try", path, path] if kept is None else kept
    return None if is_whole else words
