"""System users for child processes, so that none of them can access the files and processes of another.

If root starts the run, every service, desktop, browser and agent runs as its own numeric user, without an entry in
`/etc/passwd` and without capabilities. A user is claimed by locking a file named after its number: two runs on one
machine never share a user, and the kernel releases the lock once all its holders have died. If anyone else starts the
run, child processes keep that user, but still cannot gain privileges.

All functions here may block for a few milliseconds.
"""

import fcntl
import hashlib
import logging
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO, Self

from cua_rl.host.masking import is_secret_name
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

SERVICE_UIDS = range(60_706, 60_770)
"""For services, whose files persist. systemd's table of uids leaves 60706 to 61183 unused, and they fit into 16 bits,
so containers with their own uid map usually include them."""
GUEST_UIDS = range(60_770, 61_184)
"""For programs that a model or an agent operates. Their files are removed; they never own files of a service."""

MAX_GUEST_THREADS = 4096
"""Limit for all processes of one guest together, which stops a fork bomb. Chromium has about 300 threads."""

_SHARED_FOLDERS = ("/tmp/.X11-unix", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_ALLOWED_VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TZDIR")
_COMPUTING_CAPABILITIES = ("chown", "dac_override", "dac_read_search", "fowner", "ipc_lock", "sys_nice", "sys_resource")
"""What root's model server and trainer keep: files of other users, as in a mounted cache, pinned memory, priorities."""
_SHED_PRIVILEGES = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--pdeathsig=KILL")
_PASS_VARIABLE = "CUA_RL_PASS_ENVIRONMENT"
_END_TIMEOUT_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemUser:
    """A claimed user, as a context manager; without `uid`, the user of the controller."""

    uid: int | None = None
    lock: BinaryIO | None = None
    """Open and locked. A guard process that inherits it keeps the claim until its child processes have ended."""
    sandbox: tuple[str, ...] = ()
    """The beginning of a command line that runs the rest in a sandbox, from `sandbox.sandbox`."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` as this user in its sandbox, without a way to gain capabilities.

        The process is killed when the thread that started it ends. This parent-death signal has to be set after the
        change of user, which clears it.
        """
        if self.uid is not None:
            limits = ("prlimit", f"--nproc={MAX_GUEST_THREADS}", "--core=0", "--") if self.uid in GUEST_UIDS else ()
            become = (f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--bounding-set=-all", "--")
            return [*self.sandbox, *limits, *_SHED_PRIVILEGES, *become, *command]
        if can_shed_privileges():
            return [*self.sandbox, *_SHED_PRIVILEGES, "--", *command]
        return [*self.sandbox, *command]

    def make_folder(self, path: Path) -> None:
        """Make a folder that only this user can access, unless it exists."""
        path.mkdir(mode=0o700, exist_ok=True)
        self.give(path)

    def give(self, path: Path) -> None:
        """Make this user the owner of a file or folder; links are not followed."""
        if self.uid is not None:
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def end_processes(self) -> None:
        """Kill every process of this user if it is claimed, because nothing else runs as a claimed user."""
        if self.uid is None or self.lock is None:
            return
        deadline = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < deadline:
            # run as the user itself, kill -1 reaches all of its processes at once, including those being forked
            command = replace(self, sandbox=()).command(["sh", "-c", "kill -KILL -1"])
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL, cwd="/")
            if not (pids := processes_of(self.uid)):
                return
            for pid in pids:  # in case they killed the shell first
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(_POLL_S)

    def clean_up(self) -> None:
        """Kill remaining processes and, of a guest, remove files and IPC objects before its number is used again."""
        self.end_processes()
        if self.uid is not None and self.uid in GUEST_UIDS:
            remove_tree(*_left_files(self.uid))
            if not self.sandbox:  # which would have had IPC objects of its own
                subprocess.run(self.command(["ipcrm", "--all"]), check=False, capture_output=True, cwd="/")

    def release(self, *owned: Path) -> None:
        """Clean up, remove the folders that it owned before another can get the number, and release the claim."""
        lock = None if self.lock is None or self.lock.closed else self.lock
        if lock is not None:
            self.clean_up()
        remove_tree(*owned)
        if lock is not None:
            lock.truncate(0)
            lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def claim_user(uids: range, wanted: int | None = None) -> SystemUser:
    """Claim a free user, `wanted` if possible; processes that a killed run left under that user are ended.

    Raises:
        ConfigError: all users are taken.
    """
    if not can_change_user():
        return SystemUser()
    folder = _own_folder((Path("/run/cua_rl/users"), Path("/tmp/cua_rl-users")), mode=0o700)
    for uid in sorted(uids, key=lambda uid: uid != wanted):
        lock = (folder / str(uid)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        with suppress(KeyError):
            pwd.getpwuid(uid)  # assigned by the administrator
            lock.close()
            continue
        user = SystemUser(uid=uid, lock=lock)
        if os.fstat(lock.fileno()).st_size:  # its last holder was killed
            user.clean_up()
            lock.truncate(0)
        lock.write(b"claimed\n")
        lock.flush()
        return user
    raise ConfigError(
        f"expected a free user between {uids[0]} and {uids[-1]}, got {len(uids)} that are taken (see {str(folder)!r}); "
        "lower the number of devices, or stop other runs on this machine"
    )


def problem_of(command: Sequence[str]) -> str | None:
    """Why the command does not work on this machine, None if it does."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return (done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}") if done.returncode else None


@cache
def can_change_user() -> bool:
    """Whether child processes can run as their own users; logs a warning once if root cannot do that here."""
    if os.geteuid() != 0:
        return False
    problem = problem_of(SystemUser(uid=GUEST_UIDS[-1]).command(["true"]))
    if problem is not None:
        logger.warning(
            "programs run as root: it cannot give them users of their own here (%s); install util-linux, and give the "
            "container the capabilities SETUID, SETGID, SETPCAP, CHOWN and KILL",
            problem,
        )
    return problem is None


@cache
def can_shed_privileges() -> bool:
    """Whether `setpriv` (util-linux) can prevent child processes from gaining privileges, for example by sudo."""
    return problem_of([*_SHED_PRIVILEGES, "--", "true"]) is None


@cache
def computing_prefix() -> tuple[str, ...]:
    """The beginning of root's command of a model server or trainer: it has `_COMPUTING_CAPABILITIES`, and gains none.

    The driver's set-up of GPUs, which CUDA would start and which needs more, is done before.
    """
    if os.geteuid() != 0 or not can_shed_privileges():
        return ()
    if shutil.which("nvidia-modprobe"):
        subprocess.run(["nvidia-modprobe", "-u", "-c", "0"], check=False, capture_output=True, cwd="/")
    kept = ",+".join(("--bounding-set=-all", *_COMPUTING_CAPABILITIES))  # setpriv leaves out what we lack ourselves
    words = (*_SHED_PRIVILEGES, kept, "--")
    if problem := problem_of([*words, "true"]):
        logger.warning("model server and trainer keep the capabilities of root: %s", problem)
    return () if problem else words


def bare_environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without secrets: our PATH, language and time zone, `home` as HOME, and `more`."""
    passed = {name for name in _passed_variables() if name.startswith("LC_") or name in _ALLOWED_VARIABLES}
    kept = {name: text for name, text in os.environ.items() if name in passed}
    return {"PATH": os.defpath, **kept, "HOME": str(home), **(more or {})}


def computing_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of model server and trainer: what `passed_variables.txt` names, and what the user does.

    Their processes communicate over the loopback interface, which other machines cannot reach.
    """
    passed = _passed_variables() | set(environ.get(_PASS_VARIABLE, "").replace(",", " ").split())
    kept = {name: text for name, text in environ.items() if name in passed and not is_secret_name(name)}
    _log_withheld(" ".join(sorted(environ.keys() - kept.keys())))
    interface = "lo0" if sys.platform == "darwin" else "lo"
    # the default is below /tmp, where another user could create the folder first and plant compiled code in it
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache/torchinductor")}
    # CUDA orders GPUs by speed by default, so with several kinds of GPUs its numbers differ from nvidia-smi's
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | compiled | order | kept


@cache
def _passed_variables() -> frozenset[str]:
    lines = Path(__file__).with_name("passed_variables.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def _log_withheld(names: str) -> None:
    logger.info(
        "model server and trainer do not get these variables: %s; name what they need, but no secret, in %s",
        names,
        _PASS_VARIABLE,
    )


def processes_of(uid: int) -> list[int]:
    """Ids of the running processes of this user."""
    found: list[int] = []
    for entry in os.scandir("/proc"):
        with suppress(OSError):  # the process has ended
            if entry.name.isdecimal() and entry.stat().st_uid == uid:
                state = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(entry.name))
    return found


def public_copy(folder: Path, *siblings: Path) -> Path:
    """The folder itself, or a copy that every user can read if it lies in a closed folder such as `/root`.

    `siblings` are folders that its programs expect beside it; they are copied along.
    """
    found = folder.resolve()
    if not can_change_user() or all(parent.stat().st_mode & 0o5 == 0o5 for parent in (found, *found.parents)):
        return folder
    sources = [source for source in (folder, *siblings) if source.exists()]
    paths = [path for source in sources for path in sorted(source.rglob("*"))]
    state = "\n".join(f"{path} {path.lstat().st_size} {path.lstat().st_mtime_ns}" for path in paths)
    shelf = _own_folder((Path("/var/cache/cua_rl"), Path("/tmp/cua_rl-programs")), mode=0o755)
    place = shelf / hashlib.sha256(state.encode()).hexdigest()[:16]
    if not place.exists():
        aside = Path(tempfile.mkdtemp(dir=shelf))
        for source in sources:
            shutil.copytree(source, aside / source.name, symlinks=True)
        for path in (aside, *aside.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        with suppress(OSError):  # another run made it first
            aside.rename(place)
        remove_tree(aside)
    return place / folder.name


def remove_tree(*paths: Path) -> None:
    """Remove files and folders of any depth; `shutil.rmtree` recurses and holds a descriptor per level."""
    if found := [str(path) for path in paths if os.path.lexists(path)]:
        subprocess.run(["rm", "-rf", "--", *found], check=False, capture_output=True, cwd="/")


def _left_files(uid: int) -> list[Path]:
    """Files of a user directly in folders that all users share, such as X sockets."""
    found: list[Path] = []
    for folder in _SHARED_FOLDERS:
        with suppress(FileNotFoundError):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        found.append(Path(entry.path))
    return found


def _own_folder(choices: Sequence[Path], mode: int) -> Path:
    """The first of these folders that exists or can be made and belongs to us; raises `ConfigError` if none does."""
    for path in choices:
        with suppress(OSError):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            found = path.lstat()
            if found.st_uid == os.geteuid() and path.is_dir() and not path.is_symlink():
                path.chmod(mode)
                return path
    names = " or ".join(map(str, choices))
    raise ConfigError(f"expected to make the folder {names}, got neither; make one that belongs to root, mode {mode:o}")
