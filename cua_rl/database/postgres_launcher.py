"""Become a Postgres server: `python postgres_launcher.py BIN_DIR DATA_DIR SOCKET_DIR SETTING=VALUE...`.

Locks the data folder, creates the cluster if there is none, and replaces itself with `postgres`. The lock is inherited,
so it lasts exactly as long as any process of that server. Postgres refuses to run as root: started by root, it gets
another uid and keeps only the capability that lets it reach a folder below, say, /root. Standard library only.
"""

import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

EXIT_IN_USE = 75
"""Another server holds the data folder."""

_LOCK_WAIT_S = 3.0  # the server of a controller that was just killed needs a moment to shut down
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
_CAP_DAC_OVERRIDE = 1
_LINUX_CAPABILITY_VERSION_3 = 0x20080522


def main(arguments: list[str]) -> int:
    """Lock, prepare and exec; returns only if the folder is in use or the cluster cannot be created."""
    bin_dir, data_dir, socket_dir = (Path(argument) for argument in arguments[:3])
    if not _take_lock(data_dir.with_name(data_dir.name + ".lock")):
        sys.stderr.write(f"another Postgres server is using {data_dir}\n")
        return EXIT_IN_USE
    owner = _owner_for(data_dir)
    if not (data_dir / "PG_VERSION").exists():
        status = _create_cluster(bin_dir, data_dir, owner)
        if status != 0:
            return status
    # a crashed server leaves its pid file, and another process may have that pid by now; we hold the lock
    pid_path = data_dir / "postmaster.pid"
    if pid_path.exists():
        pid = pid_path.read_text().split("\n", 1)[0]
        comm = Path(f"/proc/{pid}/comm")
        if not (comm.exists() and comm.read_text().strip() == "postgres"):
            pid_path.unlink()
    if owner is not None:
        os.chown(socket_dir, *owner)
        _become(*owner)
    settings = [f"--{setting}" for setting in arguments[3:]]
    command = [str(bin_dir / "postgres"), "-D", str(data_dir), "-k", str(socket_dir), *settings]
    os.execv(command[0], command)


def _take_lock(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(descriptor, True)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _owner_for(data_dir: Path) -> tuple[int, int] | None:
    """uid and gid to run as, None to keep ours; an existing folder keeps its owner."""
    if os.geteuid() != 0:
        return None
    if (data_dir / "PG_VERSION").exists():
        found = (data_dir / "PG_VERSION").stat()
        if found.st_uid != 0:
            return found.st_uid, found.st_gid
    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def _create_cluster(bin_dir: Path, data_dir: Path, owner: tuple[int, int] | None) -> int:
    """Run initdb beside the data folder, then rename, so that an interrupted initdb never looks complete."""
    aside = data_dir.with_name(data_dir.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    if owner is not None:
        os.chown(aside, *owner)
    done = subprocess.run(
        [bin_dir / "initdb", "-D", aside, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"],
        stdout=sys.stderr,
        check=False,
        cwd="/",
        preexec_fn=None if owner is None else lambda: _become(*owner),
    )
    if done.returncode == 0:
        aside.rename(data_dir)
    return done.returncode


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _become(uid: int, gid: int) -> None:
    """Change from root to `uid`; CAP_DAC_OVERRIDE stays if root has it, and passes through exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    header = _CapabilityHeader(_LINUX_CAPABILITY_VERSION_3, 0)
    data = (_CapabilityData * 2)()
    libc.capget(ctypes.byref(header), data)
    kept = data[0].permitted & (1 << _CAP_DAC_OVERRIDE)
    data[0] = _CapabilityData(kept, kept, kept)
    data[1] = _CapabilityData(0, 0, 0)
    libc.capset(ctypes.byref(header), data)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of uid cleared it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
