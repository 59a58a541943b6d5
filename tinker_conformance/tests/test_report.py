"""Known failures, the scoreboard and the command's exit status."""

from pathlib import Path

import httpx
import pytest

from tinker_conformance.__main__ import main
from tinker_conformance.report import Outcome, Report, Result, judge, load_known_failures, load_report, scoreboard
from tinker_conformance.server import Server


def result(outcome: Outcome, message: str = "") -> Result:
    return Result(tier="T0", check="it_works", outcome=outcome, message=message)


def test_a_known_failure_that_passes_is_not_as_expected(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("# of version 1\n\nit_works: it does not: never\n", encoding="utf-8")
    known = load_known_failures(file)

    assert known == {"it_works": "it does not: never"}
    judged = [judge(result(outcome), known) for outcome in (Outcome.FAILED, Outcome.PASSED, Outcome.SKIPPED)]
    assert [each.outcome for each in judged] == [Outcome.KNOWN, Outcome.FIXED, Outcome.SKIPPED]
    reports = [Report(server="s", sdk="0.38.0", model="m", results=[each]) for each in judged]
    assert [each.is_as_expected for each in reports] == [True, False, True]


def test_the_scoreboard_counts_what_passed_of_what_could_be_run(tmp_path: Path) -> None:
    results = [
        result(Outcome.PASSED),
        result(Outcome.FAILED, "expected a | b\nor c"),
        result(Outcome.SKIPPED, "no torch"),
    ]
    Report(server="mini", sdk="0.38.0", model="m", results=results).write(tmp_path / "report.json")

    page = scoreboard([load_report(tmp_path / "report.json")])

    assert "| mini | 0.38.0 | 1/2 |" in page
    assert "| T0 | it works | failed | expected a \\| b or c |" in page


@pytest.mark.parametrize(
    ("mistakes", "known", "status"), [([], "", 0), (["telemetry is lost"], "", 1), ([], "{}: x", 1)]
)
def test_the_exit_status_says_whether_all_is_as_expected(
    server: Server, tmp_path: Path, mistakes: list[str], known: str, status: int
) -> None:
    check = "a_session_beats_reports_and_finishes"
    (tmp_path / "known.txt").write_text(known.format(check), encoding="utf-8")
    httpx.post(f"{server.base_url}/faults", json=mistakes).raise_for_status()
    options = [
        "--base-url",
        server.base_url,
        "--api-key",
        server.api_key,
        "--known-failures",
        str(tmp_path / "known.txt"),
    ]

    assert main([*options, "--tier", "T0", "--check", check, "--json", str(tmp_path / "report.json")]) == status
    assert load_report(tmp_path / "report.json").model == server.model


def test_a_server_that_is_not_there_cannot_be_checked() -> None:
    assert main(["--base-url", "http://127.0.0.1:9"]) == 2
