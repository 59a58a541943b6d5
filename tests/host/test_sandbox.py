"""What a program in a sandbox sees and reaches, started by root and by an ordinary user."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import cua_rl
from cua_rl.host.sandbox import can_sandbox, sandbox
from cua_rl.host.users import GUEST_UIDS, SystemUser, can_change_user

needs_namespaces = pytest.mark.skipif(not can_sandbox(), reason="the kernel permits no namespaces")
REPOSITORY = Path(cua_rl.__path__[0]).parent
STARTS_GUEST = """
import os, subprocess, sys
from cua_rl.host.guest_account import claim_guest_account

account = claim_guest_account(("sh", *sys.argv[2:]), "agent")
try:
    os.chdir("/")
    print(subprocess.run(account.user.command(["sh", "-c", sys.argv[1]]), capture_output=True, text=True).stdout)
finally:
    account.release()
"""


JOINS = """
import os, subprocess, tempfile
from pathlib import Path
from cua_rl.host.sandbox import join_sandbox, sandbox, sandbox_to_join

home, tell = Path(tempfile.mkdtemp()), ("readlink", "/proc/self/ns/net")
(home / ".tmp").mkdir()
subprocess.run(tell)
os.chdir("/")
box = [*sandbox_to_join((), home / ".tmp", home), "sh", "-c", " ".join((*tell, "; read wait"))]
with subprocess.Popen(box, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
    print(first.stdout.readline(), flush=True)
    subprocess.run([*join_sandbox(first.pid, "net"), *sandbox((), home), *tell], check=True)
    first.communicate("end")
"""


@pytest.fixture(params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> SystemUser:
    """Who starts the program."""
    if request.param == "root":
        if not can_change_user():
            pytest.skip("not root")
        return SystemUser()
    return SystemUser(uid=GUEST_UIDS[-3]) if can_change_user() else SystemUser()


def told(user: SystemUser, script: str, *files: Path, folder: Path, path: str = os.defpath) -> list[str]:
    """What a guest prints whose files these are, started by this user in this folder."""
    command = [sys.executable, "-c", STARTS_GUEST, script, *map(str, files)]
    environment = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder.parent)}
    started = command if user.uid is None else user.command(command)
    done = subprocess.run(started, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def project(user: SystemUser) -> Iterator[Path]:
    """A project below a folder that is closed to others, readable to all who get so far.

    Not below pytest's own folder, which every session that starts closes to other users.
    """
    with TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield make_project(Path(name) / "closed", user)


def make_project(closed: Path, user: SystemUser) -> Path:
    project = closed / "project"
    (project / "agents").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / "runs" / "one").mkdir(parents=True)
    for name in (".env", ".git/config", "runs/one/.cua_rl.lock", "runs/one/config.json", "agents/.env", "lib.py"):
        (project / name).write_text("secret")
    (project / "agents" / "agent.py").write_text("")
    for path in (closed, *closed.rglob("*")):
        user.give(path)
    closed.chmod(0o700)
    return project


@needs_namespaces
def test_of_a_project_a_guest_sees_neither_its_secrets_nor_its_history_nor_its_runs(
    user: SystemUser, project: Path
) -> None:
    script = f"cd {project} && find . -type f | sort; ls -A ../.. | wc -l"

    assert told(user, script, project / "agents" / "agent.py", folder=project) == ["./agents/agent.py", "./lib.py", "1"]


@needs_namespaces
def test_a_hidden_file_that_the_command_names_is_seen(user: SystemUser, project: Path) -> None:
    assert told(user, f"cat {project}/.env; echo; ls -A {project}/agents", project / ".env", folder=project) == [
        "secret", "agent.py"
    ]  # fmt: skip


@needs_namespaces
def test_a_guest_writes_to_temporary_folders_of_its_own(user: SystemUser, project: Path) -> None:
    script = f"for d in /tmp /var/tmp /dev/shm /etc; do touch $d/left-by-a-guest && echo $d; done; rm -r {project}/*"

    assert told(user, script, project, folder=project) == ["/tmp", "/var/tmp", "/dev/shm"]
    assert not Path("/tmp/left-by-a-guest").exists()
    assert (project / ".env").read_text() == "secret"  # which it does not see


@needs_namespaces
def test_a_guest_sees_no_process_of_others_and_can_gain_no_privileges(user: SystemUser, project: Path) -> None:
    script = "ls /proc | grep -c '^[0-9]'; kill -0 -1 2>&1; grep -E 'CapPrm|CapBnd|NoNewPrivs' /proc/self/status"

    count, *status = told(user, script, folder=project)

    assert int(count) <= 4
    assert status[-6:] == ["CapPrm:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_folders_that_come_and_go_beside_a_program_do_not_keep_it_from_its_sandbox(tmp_path: Path) -> None:
    project, is_over = tmp_path / "project", threading.Event()
    passing = [project / f"passing{number}" for number in range(50)]
    project.mkdir()
    (project / "agent.py").touch()

    def come_and_go() -> None:
        while not is_over.is_set():
            for folder in passing:
                folder.mkdir()
            for folder in passing:
                folder.rmdir()

    with ThreadPoolExecutor() as threads:
        coming = threads.submit(come_and_go)
        try:
            for _ in range(200):
                assert str(project) in sandbox([str(project / "agent.py")], tmp_path)
        finally:
            is_over.set()
        coming.result()


@needs_namespaces
def test_a_sandbox_can_be_in_the_network_of_another(user: SystemUser, project: Path) -> None:
    command = [sys.executable, "-c", JOINS]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(REPOSITORY), "HOME": str(project.parent)}
    started = command if user.uid is None else user.command(command)
    machine, first, second = subprocess.check_output(started, text=True, env=environment, cwd=project).split()

    assert first == second != machine


def test_without_namespaces_programs_still_run_and_the_log_says_what_remains(user: SystemUser, project: Path) -> None:
    refusing = project.parents[1] / "bin"
    refusing.mkdir()
    (refusing / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    (refusing / "bwrap").chmod(0o755)
    refusing.chmod(0o755)
    path = f"{refusing}:{os.defpath}"

    assert told(user, "id -u", folder=project, path=path)[0] != "0"

    warned = [sys.executable, "-c", "from cua_rl.host.sandbox import can_sandbox; print(can_sandbox())"]
    environment = {"PATH": path, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(user.command(warned) if user.uid else warned, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "False"
    assert "run without sandboxes (bwrap: No permissions to create new namespace)" in done.stderr
    assert "the files of your user" in done.stderr
