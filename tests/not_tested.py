"""A pytest plugin: what was not tested on this machine and why, and a failure where it could have been.

`CUA_RL_ALLOWED_SKIPS="no phone,no GPU"` allows skips whose reason begins so; every other one then fails the session.
`CUA_RL_TESTS_UNTIL=1767225600`, in Unix seconds, skips what has not begun by then, on a machine that is too slow.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "CUA_RL_ALLOWED_SKIPS"
UNTIL = "CUA_RL_TESTS_UNTIL"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture is made, which may take minutes."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(f"no time left ({UNTIL})")


def skip_reason(report: Any) -> str:
    """The reason as the test gave it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def not_tested_lines(reports: Iterable[Any]) -> list[str]:
    """A line for every folder or file and reason: "53 of tests/real/android/test_real_device.py, because no phone"."""
    counted = Counter((report.nodeid.partition("::")[0], skip_reason(report)) for report in reports)
    return [f"{number} of {place}, because {reason}" for (place, reason), number in sorted(counted.items())]


def refused(reports: Iterable[Any], allowed: str | None) -> list[Any]:
    """Those that were skipped for another reason than the allowed ones, which are separated by commas."""
    if allowed is None:
        return []
    beginnings = tuple(beginning.strip() for beginning in allowed.split(",") if beginning.strip())
    return [report for report in reports if not skip_reason(report).startswith(beginnings)]


def skipped_reports(config: pytest.Config) -> list[Any]:
    """Of all workers; empty in a worker, which has no terminal."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    return [] if terminal is None or hasattr(config, "workerinput") else list(terminal.stats.get("skipped", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and refused(
        skipped_reports(session.config), os.environ.get(VARIABLE)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = skipped_reports(config)
    if not reports:
        return
    terminalreporter.section("not tested on this machine")
    for line in not_tested_lines(reports):
        terminalreporter.line(line)
    allowed = os.environ.get(VARIABLE)
    if wrong := refused(reports, allowed):
        terminalreporter.section("skipped although it can be tested", sep="=", red=True)
        for line in not_tested_lines(wrong):
            terminalreporter.line(line)
        terminalreporter.line(f"expected only skips for {allowed!r} ({VARIABLE}); install what the reasons name")
