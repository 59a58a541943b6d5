"""Operating-system queries beyond POSIX, for Linux and macOS.

Each function takes the platform as an argument, so that both variants can be tested on one system. `process_guard.py`
has its own queries, because it imports nothing of ours.
"""

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LINUX, MACOS = "linux", "darwin"
_PR_SET_DUMPABLE = 4
MAX_DESCRIPTORS = 65_536
"""No server here needs more, and programs that close all that they could have inherited take long with millions."""


def refusal(platform: str = sys.platform) -> str | None:
    """Why nothing can start on this system, in one sentence; None where it can."""
    if platform in (LINUX, MACOS):
        return None
    where = "docs/dev/platforms.md says what works where"
    return f"expected Linux or macOS (on Windows inside WSL2), got {platform!r}; {where}"


def refuse_inspection(platform: str = sys.platform) -> None:
    """Keep programs of our own user from reading our environment and memory; Linux only.

    Without it, an agent or desktop that runs as our user would find every key in `/proc`. Debuggers are kept out too.
    """
    if platform == LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_descriptor_limit() -> int:
    """Let this process and its children open more files than by default (1,024), if they may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def is_running(pid: int) -> bool:
    """Whether a process with this id exists, whoever owns it."""
    if pid <= 0:  # to kill(2), these mean whole groups
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_locked(path: Path, platform: str = sys.platform) -> bool:
    """Whether a process holds flock(2) on a file to which holders write their process id; does not try to take it.

    On Linux the kernel lists its locks. Elsewhere the id in the file decides, which another process may have by now.
    """
    try:
        if platform == LINUX:
            inode = path.stat().st_ino
            held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
            return any(f":{inode} " in line and " FLOCK " in line for line in held)
        return is_running(int(path.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return False


def hide_arguments(secrets: Sequence[str], platform: str = sys.platform) -> bool:
    """Overwrite secrets in what other users see of this process's command line; False where that is not possible.

    They were visible from the start of the process until now, and stay so in the shell that started it.
    """
    wanted = [secret.encode(errors="surrogateescape") for secret in secrets]
    for arguments in (sys.argv, sys.orig_argv):  # programs that record how they were started read these
        for place, argument in enumerate(arguments):
            for secret in secrets:
                argument = argument.replace(secret, "***")
            arguments[place] = argument
    if platform != LINUX:
        return False
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5); 0 where the kernel does not tell
    if not begin < end:
        return False
    text = ctypes.string_at(begin, end - begin)
    hidden = text
    for secret in sorted(wanted, key=len, reverse=True):
        hidden = hidden.replace(secret, b"*" * len(secret))
    ctypes.memmove(begin, hidden, len(hidden))
    return True


def resident_bytes(platform: str = sys.platform) -> int:
    if platform != LINUX:
        return 1024 * int(_output_of("ps", "-o", "rss=", "-p", str(os.getpid())))
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes(platform: str = sys.platform) -> int:
    """Peak resident memory of this process; Linux updates it with a delay."""
    import resource  # Windows has none, and is refused with a message

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if platform == MACOS else 1024 * largest  # macOS counts bytes, Linux KiB


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the processor where the system names it, else its kind."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return found[1] if found else os.uname().machine


def free_memory_frac(platform: str = sys.platform) -> float:
    """Share of the machine's memory that is available; 1.0 where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if platform == MACOS:
        return free_frac_of_vm_stat(_output_of("vm_stat"), int(_output_of("sysctl", "-n", "hw.memsize")))
    if not meminfo.exists():
        return 1.0
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / int(fields["MemTotal"].split()[0])


def total_memory_bytes(platform: str = sys.platform, limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Main memory that this machine has, or that its container may use."""
    if platform == MACOS:
        return int(_output_of("sysctl", "-n", "hw.memsize"))
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return installed if allowed == "max" else min(installed, int(allowed))


def free_frac_of_vm_stat(printed: str, total_bytes: int) -> float:
    """From the output of macOS' vm_stat: pages that are free, or can be had without writing anything out."""
    page_size = re.search(r"page size of (\d+) bytes", printed)
    pages = dict(re.findall(r"^Pages (free|inactive|speculative): +(\d+)\.$", printed, re.MULTILINE))
    if page_size is None or not pages:
        return 1.0
    return min(1.0, int(page_size[1]) * sum(map(int, pages.values())) / total_bytes)


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
