"""What the operating system answers, here and as macOS would: both ways must agree about this process."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.host.system import (
    free_frac_of_vm_stat,
    free_memory_frac,
    is_locked,
    is_running,
    peak_resident_bytes,
    refusal,
    resident_bytes,
    total_memory_bytes,
)

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                           20000.
Pages speculative:                         2768.
Pages throttled:                              0.
Pages wired down:                        100000.
"Translation faults":                 123456789.
"""


def test_linux_and_macos_are_served_and_others_refused_in_a_sentence() -> None:
    assert (refusal("linux"), refusal("darwin")) == (None, None)
    for other in ("win32", "cygwin", "freebsd14"):
        assert refusal(other) == (
            f"expected Linux or macOS (on Windows inside WSL2), got {other!r}; "
            "docs/dev/platforms.md says what works where"
        )


def test_a_recipe_on_another_system_ends_with_the_sentence_alone() -> None:
    code = "import sys; sys.platform = 'win32'; import cua_rl.recipes.train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{refusal('win32')}\n"


def test_a_process_runs_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()

    assert is_running(os.getpid())
    assert is_running(1)  # someone else's
    assert not is_running(child.pid)
    assert not is_running(0)
    assert not is_running(-1)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_lock_is_seen_while_it_is_held(platform: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path, platform)
    path.write_text("")
    assert not is_locked(path, platform)

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert is_locked(path, platform)


def test_a_lock_whose_holder_has_ended_is_free_on_macos(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    (tmp_path / "lock").write_text(f"{child.pid}\n")

    assert not is_locked(tmp_path / "lock", "darwin")


def test_memory_of_this_process_is_the_same_either_way() -> None:
    here, there = resident_bytes("linux"), resident_bytes("darwin")

    assert here == pytest.approx(there, rel=0.1)
    assert here < 1.1 * peak_resident_bytes("linux")
    assert peak_resident_bytes("darwin") * 1024 == pytest.approx(peak_resident_bytes("linux"), rel=0.1)


def test_the_share_of_free_memory() -> None:
    assert 0.0 < free_memory_frac("linux") <= 1.0
    # (10000 + 20000 + 2768) pages of 16 KiB are half of a GiB
    assert free_frac_of_vm_stat(VM_STAT, 2**30) == 0.5
    assert free_frac_of_vm_stat("something else", 2**30) == 1.0


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path) -> None:
    installed = total_memory_bytes(limit=tmp_path / "none")
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "small").write_text("1048576\n")

    assert installed > 2**28
    assert total_memory_bytes(limit=tmp_path / "unlimited") == installed
    assert total_memory_bytes(limit=tmp_path / "small") == 1048576
