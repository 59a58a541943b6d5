"""The script that installs system packages, between doubles of the programs that it asks."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/install_system_packages.sh"
BASICS = ("bash", "env", "true")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH on which nothing is installed yet; what apt is asked for is kept in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASICS:
        (folder / name).symlink_to(shutil.which(name) or "")
    add(folder, "timeout", 'shift 2; exec "$@"')
    add(folder, "apt-cache", "exit 0")
    return folder


def add(folder: Path, name: str, body: str = "exit 0") -> None:
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (folder / name).chmod(0o755)


def run(path: Path) -> tuple[str, list[str]]:
    """What the script says, and the apt commands that it runs; it must always end well."""
    asked = path.parent / "asked"
    add(path, "id", f"echo {0 if (path / 'is-root').exists() else 1000}")
    environment = {"PATH": str(path), "ASKED": str(asked)}
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, asked.read_text().splitlines() if asked.exists() else []


def add_apt(path: Path, fails_at: str = "nothing") -> None:
    add(path, "apt-get", f'echo "$*" >>"$ASKED"; case "$*" in *{fails_at}*) exit 100;; esac')


def test_root_installs_what_is_missing(path: Path) -> None:
    add_apt(path)
    (path / "is-root").touch()
    add(path, "Xvfb")
    add(path, "google-chrome")  # any Chromium will do

    said, (update, download, install) = run(path)

    assert said.startswith("system packages: installing openbox mousepad")
    assert update.endswith("update")
    assert download.partition("--download-only ")[2] == install.partition("--no-install-recommends ")[2]
    wanted = set(install.partition("--no-install-recommends ")[2].split())
    assert {"openbox", "nodejs", "npm", "util-linux"} <= wanted
    assert not {"xvfb", "chromium-headless-shell"} & wanted


def test_a_user_whose_sudo_asks_for_no_password_installs_through_it(path: Path) -> None:
    add_apt(path)
    add(path, "sudo", 'shift; exec "$@"')  # sudo -n COMMAND

    said, commands = run(path)

    assert "installing xvfb" in said
    assert len(commands) == 3


def test_other_users_are_told_the_one_line_to_run(path: Path) -> None:
    add_apt(path)
    add(path, "sudo", "exit 1")

    said, commands = run(path)

    assert commands == []
    assert "sudo apt-get update && sudo apt-get install --no-install-recommends xvfb openbox" in said


def test_servers_that_do_not_answer_are_said_and_end_nothing(path: Path) -> None:
    add_apt(path, fails_at="update")
    (path / "is-root").touch()

    said, commands = run(path)

    assert len(commands) == 1
    assert "apt's servers do not answer, so xvfb" in said


def test_packages_that_this_system_does_not_have_are_left_out(path: Path) -> None:
    add_apt(path)
    (path / "is-root").touch()
    add(path, "apt-cache", '[ "$2" != chromium-headless-shell ]')

    said, commands = run(path)

    assert "apt knows no chromium-headless-shell here" in said
    assert commands[-1].endswith(("nodejs npm", "npm fonts-liberation"))


def test_a_machine_that_has_everything_is_left_alone(path: Path) -> None:
    add_apt(path)
    for name in ("Xvfb", "openbox", "mousepad", "pcmanfm", "xterm", "setpriv", "node", "npm", "chromium"):
        add(path, name)

    _, commands = run(path)

    # fonts are files, not programs: this machine may have them or not
    assert all("xvfb" not in command for command in commands)
