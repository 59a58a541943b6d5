"""Users for the programs beside the controller, so that none of them can touch what belongs to another.

Started by root, every service, desktop, browser and agent gets a numeric user of its own, without an entry in
`/etc/passwd`, and no capabilities. A claim is a lock on a file named after the number: two runs on one machine never
share a user, and the kernel frees it once its holders are dead. Started by anyone else, programs keep that user; they
still cannot gain privileges.

Everything here may block for some milliseconds.
"""

import fcntl
import hashlib
import logging
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cua_rl.errors import ConfigError

logger = logging.getLogger(__name__)

SERVICE_UIDS = range(60_706, 60_770)
"""For services, which leave files behind. systemd's table of uids keeps 60706 to 61183 unused, and they fit into 16
bits, so that containers with a map of their own usually have them."""
GUEST_UIDS = range(60_770, 61_184)
"""For what a model or an agent operates. Such a user never owned a file of a service, and its own are removed."""

MAX_GUEST_THREADS = 4096
"""Of one guest, in all of its programs: a program that forks without end is stopped there. Chromium has about 300."""

_SHARED_FOLDERS = ("/tmp/.X11-unix", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_SHARED_IPC = {"shm": "--shmem-id", "msg": "--queue-id", "sem": "--semaphore-id"}
"""What System V programs share, as /proc/sysvipc names it, and the option of `ipcrm` that removes it."""
_ALLOWED_VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TZDIR")
_SHED_PRIVILEGES = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--pdeathsig=KILL")
_COMPUTING_VARIABLES = (
    *_ALLOWED_VARIABLES, "HOME", "USER", "LOGNAME", "TMPDIR", "VIRTUAL_ENV", "CC", "CXX", "MAX_JOBS", "SSL_CERT_FILE",
    "HF_HOME", "NO_COLOR", "FORCE_COLOR",
)  # fmt: skip
_COMPUTING_FAMILIES = (
    "LC_", "LD_", "DYLD_", "PYTHON", "CONDA_", "XDG_", "CUA_RL_", "VLLM_", "HF_HUB_", "TRANSFORMERS_", "TOKENIZERS_",
    "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TP_", "HIP_", "HSA_", "ROC",
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "ATEN_", "DNNL_", "ONEDNN_",
)  # fmt: skip
_SECRET_WORDS = {"TOKEN", "SECRET", "PASSWORD", "CREDENTIALS", "KEY"}
_END_TIMEOUT_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemUser:
    """A claimed user, a context manager; without `uid`, whoever runs the controller."""

    uid: int | None = None
    lock: BinaryIO | None = None
    """Open and locked; a guard that inherits it keeps the claim until the programs that it guards have ended."""
    shown: tuple[Path, ...] = ()
    """What its programs see, alone, of folders that only root can look into (from `hidden_entries`)."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run by this user without capabilities and without a way to gain any.

        It ends with the thread that started it: changing the user makes the kernel forget that wish of a guard.
        """
        if self.uid is not None:
            limits = ("prlimit", f"--nproc={MAX_GUEST_THREADS}", "--core=0", "--") if self.uid in GUEST_UIDS else ()
            return [
                *_view(self.shown), *limits,
                "setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--no-new-privs",
                "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--pdeathsig=KILL", "--", *command,
            ]  # fmt: skip
        if can_shed_privileges():
            return [*_SHED_PRIVILEGES, "--", *command]
        return list(command)

    def make_folder(self, path: Path) -> None:
        """Make a folder that this user alone can look into, unless it exists."""
        path.mkdir(mode=0o700, exist_ok=True)
        self.give(path)

    def give(self, path: Path) -> None:
        """Let a file or folder belong to this user; a link is not followed."""
        if self.uid is not None:
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def end_processes(self) -> None:
        """Kill every process of this user, if it was claimed: no others share it then."""
        if self.uid is None or self.lock is None:
            return
        deadline = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < deadline:
            # by itself, the user reaches all of its processes at once, even those that are just being forked
            subprocess.run(self.command(["sh", "-c", "kill -KILL -1"]), check=False, stderr=subprocess.DEVNULL, cwd="/")
            if not (pids := processes_of(self.uid)):
                return
            for pid in pids:  # they may have killed that
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(_POLL_S)

    def clean_up(self) -> None:
        """End what the user still runs, and remove what a guest left for the next one of its number to find."""
        self.end_processes()
        if self.uid is not None and self.uid in GUEST_UIDS:
            remove_tree(*_left_files(self.uid))
            if left := _left_ipc(self.uid):
                subprocess.run(["ipcrm", *left], check=False, capture_output=True, cwd="/")

    def release(self) -> None:
        """Clean up and give the claim back."""
        if self.lock is not None and not self.lock.closed:
            self.clean_up()
            self.lock.truncate(0)
            self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim_user(uids: range, wanted: int | None = None, *, shown: tuple[Path, ...] = ()) -> SystemUser:
    """A user that nobody else has, `wanted` if it is free; what a killed run left running as that user is ended.

    Raises `ConfigError` if all are taken.
    """
    if not can_change_user():
        return SystemUser()
    folder = _lock_folder()
    for uid in sorted(uids, key=lambda uid: uid != wanted):
        lock = (folder / str(uid)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if _has_name(uid):  # the administrator gave it to somebody
            lock.close()
            continue
        user = SystemUser(uid=uid, lock=lock, shown=shown)
        if os.fstat(lock.fileno()).st_size:  # whoever had it was killed
            user.clean_up()
            lock.truncate(0)
        lock.write(b"claimed\n")
        lock.flush()
        return user
    raise ConfigError(
        f"expected a free user between {uids[0]} and {uids[-1]}, got {len(uids)} that are taken (see {str(folder)!r}); "
        "lower the number of devices, or stop other runs on this machine"
    )


@cache
def can_change_user() -> bool:
    """Whether programs can get users of their own; the log says so once if root cannot give them any."""
    if os.geteuid() != 0:
        return False
    trial = SystemUser(uid=GUEST_UIDS[-1]).command(["true"])
    try:
        done = subprocess.run(trial, capture_output=True, text=True, check=False, cwd="/")
    except FileNotFoundError:
        problem = "there is no setpriv"
    else:
        problem = done.stderr.strip()
        if done.returncode == 0:
            return True
    logger.warning(
        "programs run as root: it cannot give them users of their own here (%s); install util-linux, and give the "
        "container the capabilities SETUID, SETGID, SETPCAP, CHOWN and KILL",
        problem,
    )
    return False


@cache
def can_shed_privileges() -> bool:
    """Whether `setpriv` (util-linux) can keep programs of this user from gaining privileges, as by sudo."""
    try:
        return (
            subprocess.run([*_SHED_PRIVILEGES, "--", "true"], capture_output=True, check=False, cwd="/").returncode == 0
        )
    except FileNotFoundError:
        return False


def bare_environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program that needs no secret: PATH, language and time zone of ours, HOME, and `more`."""
    kept = {name: text for name, text in os.environ.items() if name in _ALLOWED_VARIABLES or name.startswith("LC_")}
    return {"PATH": os.defpath, **kept, "HOME": str(home), **(more or {})}


def computing_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of model server and trainer: what sets up Python, libraries and GPUs, and no secret of ours.

    Their processes talk to each other on the loopback interface, which other machines do not reach.
    """
    kept = {
        name: text
        for name, text in environ.items()
        if (name in _COMPUTING_VARIABLES or name.startswith(_COMPUTING_FAMILIES))
        and not _SECRET_WORDS & set(name.split("_"))
    }
    interface = "lo0" if sys.platform == "darwin" else "lo"
    # by default below /tmp, where another user may make the folder first, and with it the code that is loaded from it
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache/torchinductor")}
    # CUDA's own order is by speed: on a machine with several kinds of GPUs, its numbers are not those of nvidia-smi
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | compiled | order | kept


def processes_of(uid: int) -> list[int]:
    """Numbers of the living processes that run as this user."""
    found: list[int] = []
    for entry in os.scandir("/proc"):
        with suppress(OSError):  # it ends meanwhile
            if entry.name.isdecimal() and entry.stat().st_uid == uid:
                state = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(entry.name))
    return found


def public_copy(folder: Path, *siblings: Path) -> Path:
    """The folder of programs, or a copy, which every user can reach: some lie below `/root`, which is root's alone.

    Folders beside it, of which the programs know that they are there, are copied along.
    """
    if not can_change_user() or all(parent.stat().st_mode & 0o5 == 0o5 for parent in _ancestors(folder)):
        return folder
    sources = [source for source in (folder, *siblings) if source.exists()]
    found = [path for source in sources for path in sorted(source.rglob("*"))]
    state = "\n".join(f"{path} {path.lstat().st_size} {path.lstat().st_mtime_ns}" for path in found)
    shelf = _own_folder((Path("/var/cache/cua_rl"), Path("/tmp/cua_rl-programs")), mode=0o755)
    place = shelf / hashlib.sha256(state.encode()).hexdigest()[:16]
    if not place.exists():
        aside = Path(tempfile.mkdtemp(dir=shelf))
        for source in sources:
            shutil.copytree(source, aside / source.name, symlinks=True)
        for path in (aside, *aside.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        with suppress(OSError):  # another run was faster
            aside.rename(place)
        remove_tree(aside)
    return place / folder.name


def hidden_entries(files: Iterable[str]) -> tuple[Path, ...]:
    """The entries of folders closed to other users through which the way to these files leads, links included.

    For an interpreter in `/root/.pyenv/versions/3.11/bin`, where only `/root` is closed, it is `/root/.pyenv`.
    """
    found: dict[Path, None] = {}
    for file in filter(os.path.exists, files):
        ways = [Path(file).absolute()]
        while ways[-1].is_symlink():
            ways.append(ways[-1].parent / ways[-1].readlink())
        for way in [Path(os.path.abspath(way)) for way in ways] + [way.parent.resolve() / way.name for way in ways]:
            closed = [parent for parent in way.parents if not parent.stat().st_mode & 0o001]
            if closed:  # ordered from the inside to the outside
                found[way.parents[way.parents.index(closed[0]) - 1] if closed[0] != way.parent else way] = None
    return tuple(found)


def remove_tree(*paths: Path) -> None:
    """Remove what programs left, however deep: `shutil.rmtree` recurses and holds a descriptor per level."""
    if found := [str(path) for path in paths if os.path.lexists(path)]:
        subprocess.run(["rm", "-rf", "--", *found], check=False, capture_output=True, cwd="/")


def _view(entries: Sequence[Path]) -> list[str]:
    """The start of a command in a mount namespace where closed folders have nothing but these entries."""
    if not entries:
        return []
    script = ["set -e"]
    outermost = {entry: [one for one in entry.parents if not one.stat().st_mode & 0o001][-1] for entry in entries}
    for closed in sorted(set(outermost.values())):
        inside = shlex.quote(str(closed))
        # the descriptor still leads into the folder after it is covered; `mount -c` keeps it as it is
        script += [f"exec 3<{inside}", f"mount -t tmpfs -o mode=0711,size=1m cua_rl {inside}"]
        for entry in sorted(one for one, outer in outermost.items() if outer == closed):
            # where a link leads now: once the folder is covered, it would lead to what the folder shows by then
            real, root = entry.resolve(), closed.resolve()
            place = f"/proc/self/fd/3/{real.relative_to(root)}" if real.is_relative_to(root) else str(real)
            source, target = shlex.quote(place), shlex.quote(str(entry))
            make = "mkdir -p" if entry.is_dir() else f"mkdir -p {shlex.quote(str(entry.parent))}; touch"
            script += [f"{make} {target}", f"mount -c --bind {source} {target}"]
        script += ["exec 3<&-", f"mount -o remount,ro {inside}"]
    # whoever stays in a covered folder is still in the one that is closed
    script += ['cd "$(pwd -P)" 2>/dev/null || cd /', 'exec "$@"']
    return ["unshare", "--mount", "--propagation=private", "--", "sh", "-c", "; ".join(script), "sh"]


def _ancestors(folder: Path) -> list[Path]:
    folder = folder.resolve()
    return [folder, *folder.parents]


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _left_files(uid: int) -> list[Path]:
    """What a user owns directly in folders that all users share, such as X sockets."""
    found: list[Path] = []
    for folder in _SHARED_FOLDERS:
        with suppress(FileNotFoundError):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        found.append(Path(entry.path))
    return found


def _left_ipc(uid: int) -> list[str]:
    """Options of `ipcrm` for the memory, queues and semaphores that a user made: they outlive their processes."""
    found: list[str] = []
    for kind, option in _SHARED_IPC.items():
        with suppress(FileNotFoundError):  # a kernel without them
            names, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
            maker = names.index("cuid")  # the owner may have been changed
            found += [f"{option}={row[1]}" for row in rows if row[maker] == str(uid)]
    return found


def _lock_folder() -> Path:
    return _own_folder((Path("/run/cua_rl/users"), Path("/tmp/cua_rl-users")), mode=0o700)


def _own_folder(choices: Sequence[Path], mode: int) -> Path:
    """The first of the folders that can be made; raises `ConfigError` if none, or if somebody else made it."""
    for path in choices:
        with suppress(OSError):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            found = path.lstat()
            if found.st_uid == os.geteuid() and path.is_dir() and not path.is_symlink():
                path.chmod(mode)
                return path
    names = " or ".join(map(str, choices))
    raise ConfigError(f"expected to make the folder {names}, got neither; make one that belongs to root, mode {mode:o}")
