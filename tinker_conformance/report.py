"""Results of a run: as lines, as JSON, against a file of known failures, and as a scoreboard of several runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    KNOWN = "known failure"
    """It failed, as the file of known failures says."""
    FIXED = "unexpected pass"
    """It passed, although it is a known failure: the file is out of date."""
    SKIPPED = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check of a run."""

    tier: str
    check: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of a run against one server with one SDK."""

    server: str
    sdk: str
    model: str
    results: Sequence[Result]

    @property
    def is_as_expected(self) -> bool:
        """Whether every check passed, was not applicable or is a known failure."""
        return not any(result.outcome in (Outcome.FAILED, Outcome.FIXED) for result in self.results)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_report(path: Path) -> Report:
    """What `Report.write` wrote."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    results = [replace(Result(**each), outcome=Outcome(each["outcome"])) for each in fields.pop("results")]
    return Report(**fields, results=results)


def load_known_failures(path: Path) -> dict[str, str]:
    """Lines `name of the check: what was found`; empty lines and those that begin with # say nothing."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition(":") for line in lines if line and not line.startswith("#")]
    return {name.strip(): found.strip() for name, _, found in pairs}


def judge(result: Result, known_failures: Mapping[str, str]) -> Result:
    """The result in the light of what is known of the server."""
    if result.check not in known_failures or result.outcome is Outcome.SKIPPED:
        return result
    outcome = Outcome.KNOWN if result.outcome is Outcome.FAILED else Outcome.FIXED
    known = known_failures[result.check]
    return replace(result, outcome=outcome, message=f"{known} ({result.message})" if result.message else known)


def scoreboard(reports: Sequence[Report]) -> str:
    """A page in Markdown: how many checks of each tier passed, then every check that did not pass."""
    tiers = sorted({result.tier for report in reports for result in report.results})
    lines = ["# Tinker conformance", "", f"| server | SDK | {' | '.join(tiers)} |", "|---|---|" + "---|" * len(tiers)]
    lines += [
        f"| {each.server} | {each.sdk} | {' | '.join(_score(each, tier) for tier in tiers)} |" for each in reports
    ]
    lines += ["", "Passed of those that could be run.", ""]
    for report in reports:
        rows = [each for each in report.results if each.outcome is not Outcome.PASSED]
        if rows:
            lines += [
                f"## {report.server}, SDK {report.sdk}",
                "",
                "| tier | check | outcome | what was found |",
                "|---|---|---|---|",
            ]
            for each in rows:
                message = each.message.replace("|", "\\|").replace("\n", " ")[:400]
                lines.append(f"| {each.tier} | {each.check.replace('_', ' ')} | {each.outcome} | {message} |")
            lines.append("")
    return "\n".join(lines)


def _score(report: Report, tier: str) -> str:
    run = [each for each in report.results if each.tier == tier and each.outcome is not Outcome.SKIPPED]
    passed = [each for each in run if each.outcome in (Outcome.PASSED, Outcome.FIXED)]
    return f"{len(passed)}/{len(run)}" if run else "-"
