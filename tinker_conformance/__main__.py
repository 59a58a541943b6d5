"""The command: `python -m tinker_conformance --base-url URL [--tier T0 T1] [--known-failures FILE] [--json FILE]`."""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tinker

from tinker_conformance.checks import TIERS
from tinker_conformance.report import Outcome, Report, judge, load_known_failures, load_report, scoreboard
from tinker_conformance.run import run_checks
from tinker_conformance.server import Server
from tinker_conformance.wire import Json


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is as expected, 1 if checks failed or known failures passed, 2 if nothing could be checked."""
    options = _options(arguments)
    if options.scoreboard:
        sys.stdout.write(scoreboard([load_report(path) for path in options.scoreboard]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            base_url=options.base_url,
            api_key=options.api_key,
            model=options.model or "",
            tolerance=options.tolerance,
            serve=options.serve,
            group_file=Path(folder) / "group",
        )
        try:
            if server.serve:
                server.start()
            return _check(server, options)
        finally:
            server.kill()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tinker_conformance", description=__doc__)
    parser.add_argument(
        "--base-url", default=os.environ.get("TINKER_BASE_URL", ""), help="TINKER_BASE_URL if not given"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("TINKER_API_KEY", "tml-none"), help="TINKER_API_KEY if not given"
    )
    parser.add_argument("--model", help="base model; the first one that the server names if not given")
    parser.add_argument("--tier", nargs="+", choices=list(TIERS), help="all if not given; T4 only with --serve")
    parser.add_argument("--check", nargs="+", default=[], help="only these checks")
    parser.add_argument("--serve", help="command that starts the server; T4 kills it")
    parser.add_argument("--known-failures", type=Path, help="a file, or the name of one that comes with the suite")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--name", default="", help="how the server is called in the results")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="between log-probabilities of sampler and trainer"
    )
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one check")
    parser.add_argument(
        "--scoreboard", nargs="+", type=Path, metavar="JSON", help="print a page of these results instead"
    )
    options = parser.parse_args(arguments)
    if not options.base_url and not options.scoreboard:
        parser.error("expected --base-url or TINKER_BASE_URL, got neither")
    options.tier = options.tier or [tier for tier in TIERS if tier != "T4" or options.serve]
    return options


def _check(server: Server, options: argparse.Namespace) -> int:
    try:
        server = _with_model(server)
    except Exception as error:  # noqa: BLE001 - whatever a server that cannot be checked does
        sys.stderr.write(f"expected a Tinker server at {server.base_url}, got {type(error).__name__}: {error}\n")
        return 2
    known = load_known_failures(_known_failures(options.known_failures)) if options.known_failures else {}
    report = Report(server=options.name or server.base_url, sdk=tinker.__version__, model=server.model, results=[])
    for result in run_checks(server, options.tier, options.check, options.time_limit):
        each = judge(result, known)
        report = dataclasses.replace(report, results=[*report.results, each])
        details = f": {each.message}" if each.message else ""
        sys.stdout.write(
            f"{each.tier} {each.outcome:15} {each.seconds:6.1f} s  {each.check.replace('_', ' ')}{details}\n"
        )
        sys.stdout.flush()
        if options.json:
            report.write(options.json)
    counts = {outcome: sum(each.outcome is outcome for each in report.results) for outcome in Outcome}
    sys.stdout.write(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) + "\n")
    return 0 if report.is_as_expected else 1


def _with_model(server: Server) -> Server:
    if server.model:
        return server
    models: list[Json] = server.wire().get("get_server_capabilities").get("supported_models") or []
    if not models:
        raise ValueError("expected models in its capabilities, got none")
    return dataclasses.replace(server, model=str(models[0]["model_name"]))


def _known_failures(path: Path) -> Path:
    return path if path.exists() else Path(__file__).parent / "known_failures" / f"{path}.txt"


if __name__ == "__main__":
    sys.exit(main())
