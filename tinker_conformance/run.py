"""Runs checks, each in a process of its own."""

import logging
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from tinker_conformance.checks import checks_of
from tinker_conformance.expect import CheckFailed, NotApplicable
from tinker_conformance.report import Outcome, Result
from tinker_conformance.server import Server


def run_checks(server: Server, tiers: Sequence[str], only: Sequence[str], time_limit_s: float) -> Iterator[Result]:
    """Each check in a process of its own, which is killed when its time is up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tinker_conformance.checks"])
    for tier in tiers:
        for name in checks_of(tier):
            if only and name not in only:
                continue
            started = time.monotonic()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_one, args=(server, tier, name, theirs))
            process.start()
            theirs.close()
            outcome, message = Outcome.FAILED, f"no result within {time_limit_s:.0f} s"
            if ours.poll(time_limit_s):
                try:
                    outcome, message = ours.recv()
                except EOFError:
                    message = "its process ended without a result"
            process.kill()
            process.join()
            seconds = round(time.monotonic() - started, 2)
            yield Result(tier=tier, check=name, outcome=outcome, message=message, seconds=seconds)


def _run_one(server: Server, tier: str, name: str, results: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    outcome = outcome_of(lambda: checks_of(tier)[name](server))
    if server.wire().answers():
        server.finish_sessions()
    results.send(outcome)


def outcome_of(check: Callable[[], None]) -> tuple[Outcome, str]:
    """What becomes of a check, and why."""
    try:
        check()
    except NotApplicable as reason:
        return Outcome.SKIPPED, str(reason)
    except CheckFailed as failure:
        return Outcome.FAILED, str(failure)
    except Exception as error:  # noqa: BLE001 - a check fails by whatever the SDK raises
        lines = [
            frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("_checks.py")
        ]
        return Outcome.FAILED, f"{type(error).__name__}: {str(error)[:500]} (in `{lines[-1] if lines else '?'}`)"
    return Outcome.PASSED, ""
