"""The end of a test run says what was skipped and why; where only some reasons are allowed, others fail it."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a_phone(number):
    pytest.skip("no phone: adb shows none")

def test_something_else():
    pass
"""
NEEDLESS = """
import pytest
pytest.importorskip("a_package_that_nobody_has", reason="`make setup` installs it")
"""


def run_tests(folder: Path, *options: str, allowed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.not_tested",
        "--rootdir",
        str(folder),
        *options,
        str(folder),
    ]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUA_RL_ALLOWED_SKIPS": allowed}
    return subprocess.run(
        command, cwd=folder, env=os.environ | own | variables, capture_output=True, text=True, check=False
    )


def test_allowed_skips_are_listed_by_reason_and_pass(tmp_path: Path) -> None:
    (tmp_path / "test_phones.py").write_text(TESTS)

    done = run_tests(tmp_path, allowed="no GPU, no phone")

    assert done.returncode == 0, done.stdout
    assert "not tested on this machine" in done.stdout
    assert "3 of test_phones.py, because no phone: adb shows none\n" in done.stdout
    assert "skipped although" not in done.stdout


def test_a_needless_skip_fails_a_run_of_two_workers(tmp_path: Path) -> None:
    (tmp_path / "test_phones.py").write_text(TESTS)
    (tmp_path / "test_package.py").write_text(NEEDLESS)

    done = run_tests(tmp_path, "-p", "xdist", "--numprocesses=2", allowed="no phone,no GPU")

    assert done.returncode == 1, done.stdout
    needless = done.stdout.split("skipped although it can be tested")[1]
    assert "1 of test_package.py, because `make setup` installs it\n" in needless
    assert "test_phones" not in needless
    assert "expected only skips for 'no phone,no GPU' (CUA_RL_ALLOWED_SKIPS)" in needless


FIXTURE = """
import pytest

@pytest.fixture
def server(tmp_path_factory):
    raise RuntimeError("made")

def test_with_a_server(server):
    pass

def test_without_one():
    pass
"""


def test_what_has_not_begun_in_time_is_listed_and_its_fixtures_are_not_made(tmp_path: Path) -> None:
    (tmp_path / "test_servers.py").write_text(FIXTURE)

    in_time = run_tests(tmp_path, allowed="no time left", CUA_RL_TESTS_UNTIL=str(time.time() + 3600))
    late = run_tests(tmp_path, allowed="no time left", CUA_RL_TESTS_UNTIL=str(time.time() - 1))

    assert in_time.returncode == 1, in_time.stdout
    assert "1 passed, 1 error" in in_time.stdout
    assert late.returncode == 0, late.stdout
    assert "2 of test_servers.py, because no time left (CUA_RL_TESTS_UNTIL)\n" in late.stdout
