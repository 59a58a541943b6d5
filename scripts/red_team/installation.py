"""What set-up installs: hashed files of locks, images and actions by digest, nothing as root for who declines."""

import re
import shutil
import subprocess
from pathlib import Path

from scripts.red_team.findings import Findings, Targets, check

ROOT = Path(__file__).parents[2]
_INSTALLERS = (
    "scripts/*.sh",
    "benchmarks/*.sh",
    "examples/**/*.sh",
    "deploy/*.sh",
    "Makefile",
    "Dockerfile",
    ".ci/run",
)
_LOCKED = re.compile(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==\S+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+")


def locks() -> list[Path]:
    """All lock files."""
    return sorted(path for folder in ("constraints", "examples/harnesses") for path in (ROOT / folder).rglob("*.txt"))


def unlocked(lock: Path) -> list[str]:
    """Requirements of a lock without one version and hashes; the file's name if it has none at all."""
    text = re.sub(r"^ *#.*\n", "", lock.read_text(), flags=re.MULTILINE)
    requirements = re.split(r"\n(?=\S)", text.strip())
    return [one for one in requirements if not _LOCKED.fullmatch(one)] if text.strip() else [lock.name]


def unhashed_installations() -> tuple[int, list[str]]:
    """The number of commands that install Python packages, and those that take other files than those of a lock."""
    files = [path for pattern in _INSTALLERS for path in ROOT.glob(pattern)]
    text = "\n".join(path.read_text().replace("\\\n", "") for path in files)
    commands = [line for line in text.splitlines() if re.search(r"pip\"? install", line) and "apt" not in line]
    others = [one for one in commands if "--require-hashes" not in one and "--no-index" not in one]
    return len(commands), others + re.findall(r".*extra-index.*", text)


def undigested_names() -> tuple[int, list[str]]:
    """The number of images and actions, and those of others that are not named by their digests."""
    files = [ROOT / name for name in ("Dockerfile", "compose.yaml", ".github/workflows/check.yml")]
    text = "".join(path.read_text() for path in (*files, *(ROOT / "deploy/kubernetes").glob("*.yaml")))
    names = re.findall(r"(?:ARG DEBIAN=|image: |uses: )(\S+)", text)
    digest = re.compile(r"@sha256:[0-9a-f]{64}$|@[0-9a-f]{40}$")
    return len(names), [one for one in names if one not in ("cua_rl:cpu", "cua_rl:gpu") and not digest.search(one)]


def make_doubles(folder: Path) -> Path:
    """A PATH on which nothing is installed yet; what apt is asked for is kept in a file."""
    folder.mkdir()
    for name in ("bash", "env", "true"):
        (folder / name).symlink_to(shutil.which(name) or "")
    add_double(folder, "timeout", 'shift 2; exec "$@"')
    add_double(folder, "apt-cache", "exit 0")
    return folder


def add_double(folder: Path, name: str, body: str = "exit 0") -> None:
    """A program that does this instead."""
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (folder / name).chmod(0o755)


def add_apt(path: Path, fails_at: str = "nothing") -> None:
    """An apt-get that notes what it is asked for."""
    add_double(path, "apt-get", f'echo "$*" >>"$ASKED"; case "$*" in *{fails_at}*) exit 100;; esac')


def install_system_packages(path: Path, **more: str) -> tuple[str, list[str]]:
    """What the script says, and the apt commands that it runs; it must always end well."""
    asked = path.parent / "asked"
    add_double(path, "id", f"echo {0 if (path / 'is-root').exists() else 1000}")
    environment = {"PATH": str(path), "ASKED": str(asked)} | more
    script = ["bash", ROOT / "scripts/install_system_packages.sh"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, asked.read_text().splitlines() if asked.exists() else []


def attack_installation(targets: Targets) -> Findings:
    """Row 21: whoever serves a package, an image or an action in place of the one that was reviewed."""
    found = [f"{lock.name}: {one}" for lock in locks() for one in unlocked(lock)]
    yield check(21, f"packages of {len(locks())} locks without hashes", "none", found or "none", not found)
    number, found = unhashed_installations()
    yield check(21, f"{number} installations of other files", "none", found or "none", number >= 8 and not found)
    number, found = undigested_names()
    yield check(21, f"{number} images and actions without digest", "none", found or "none", number >= 9 and not found)
    path = make_doubles(targets.folder / "doubles")
    add_apt(path)
    (path / "is-root").touch()
    said, asked = install_system_packages(path, CUA_RL_NO_SYSTEM_PACKAGES="1")
    is_told = "browser and desktop devices need" in said
    yield check(21, "root declines system packages", "none, and told so", asked or said, is_told and not asked)
    said, asked = install_system_packages(path)
    is_announced = said.startswith("system packages: installing") and "as root" in said
    yield check(21, "root installs system packages", "announced", said, is_announced and bool(asked))
