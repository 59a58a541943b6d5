"""Browser profiles are folders that name their owner, so that the next run can clear away what a crashed one left."""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from cua_rl.system import is_running, processes_with_argument

_PREFIX = "cua_rl_browser_"


def make_profile(folder: Path | None = None) -> Path:
    """A new folder for a browser of this process."""
    parent = folder or Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=parent))


def remove_profile(profile: Path) -> None:
    """Delete the folder; a browser that is still ending may write into it meanwhile."""
    for _ in range(3):
        shutil.rmtree(profile, ignore_errors=True)
        if not profile.exists():
            return


def remove_leftovers(folder: Path | None = None) -> int:
    """End browsers whose owner is gone and delete their profiles; returns how many profiles those were."""
    parent = folder or Path(tempfile.gettempdir())
    abandoned = [profile for profile in parent.glob(f"{_PREFIX}*") if not _has_owner(profile)]
    for profile in abandoned:
        # by their argument: the pid in a file could long be someone else's
        for pid in processes_with_argument(f"--user-data-dir={profile}"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        remove_profile(profile)
    return len(abandoned)


def _has_owner(profile: Path) -> bool:
    pid = profile.name.removeprefix(_PREFIX).partition("_")[0]
    return not pid.isdigit() or is_running(int(pid)) or _is_foreign(profile)


def _is_foreign(profile: Path) -> bool:
    try:
        return profile.stat().st_uid != os.getuid()
    except FileNotFoundError:
        return True
