"""Run the quick benchmarks, keep their figures, and write them into docs/dev/performance.md: `make bench`.

    .venv/bin/python -m benchmarks.run [trainer_memory publish_latency]    # all quick ones without names

`results.jsonl` has one line per figure with the command and the machine it comes from; a new run replaces the lines of
the commands that it runs and leaves the others. Benchmarks that take long are run by hand with `--keep` FILE, which
takes the lines that they printed.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE.parent / "docs" / "dev" / "performance.md"
BEGIN, END = "<!-- figures: written by benchmarks/run.py -->", "<!-- end of figures -->"
TIMEOUT_S = 900
QUICK: Mapping[str, str] = {
    "import_time": "import_time",
    "trainer_memory": "trainer_memory --steps 30",
    "trainer_against_trl": "trainer_against_trl --cells tiny:3:merged",
    "async_against_sync": "async_against_sync",
    "publish_latency": "publish_latency",
    "database_writer": "database_writer",
    "controller_load": "controller_load",
}
"""What `make bench` runs: a few minutes each at most on two free cores."""


def machine() -> str:
    """What the figures were taken on."""
    names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(names)} cores of {names[0].strip()}, {memory:.0f} GiB, no GPU, Python {platform.python_version()}"


def run(arguments: str) -> list[dict[str, Any]]:
    """Run one benchmark; its JSON lines with what they came from, none if it cannot run here."""
    command = f"python -m benchmarks.{arguments}"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(f"benchmarks.{arguments}")],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    print(f"{command}: {time.monotonic() - started:.0f} s, status {done.returncode}", flush=True)
    if done.returncode:
        print("\n".join(done.stderr.strip().splitlines()[-3:]), file=sys.stderr)
        return []
    return [labelled(line, command) for line in done.stdout.splitlines() if line.startswith("{")]


def labelled(line: str, command: str) -> dict[str, Any]:
    """A printed figure with the command and the machine."""
    return {**json.loads(line), "command": command, "machine": machine()}


def merge(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old figures but those of commands that are among the new ones, and the new ones."""
    commands = {figure["command"] for figure in new}
    return [figure for figure in old if figure["command"] not in commands] + list(new)


def as_table(figures: Sequence[dict[str, Any]]) -> str:
    """Markdown: what was measured, what is aimed at, what physics allows, how to measure it again."""
    rows = ["| figure | measured | target | limit | command |", "|---|---|---|---|---|"]
    for figure in figures:
        columns: dict[str, list[str]] = {"measured": [], "target": [], "limit": []}
        for key, value in figure.items():
            if key not in ("figure", "command", "machine"):
                kind = "target" if key.startswith("target") else "limit" if "limit" in key else "measured"
                columns[kind].append(f"{key.replace('_', ' ')} {_written(value)}")
        cells = [figure["figure"].replace("_", " "), *("<br>".join(part) for part in columns.values())]
        rows.append(f"| {' | '.join(cells)} | `{figure['command']}` |")
    machines = sorted({figure["machine"] for figure in figures})
    return "\n".join([*rows, "", *(f"Machine: {name}." for name in machines)])


def _written(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run what was asked for and write both files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*QUICK, []], metavar="NAME", help="which ones; all without")
    parser.add_argument("--keep", nargs=2, metavar=("FILE", "COMMAND"), help="take these lines of a run by hand")
    parser.add_argument("--page-only", action="store_true", help="write the page from the results that are there")
    arguments = parser.parse_args()
    figures = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if arguments.keep:
        lines = Path(arguments.keep[0]).read_text().splitlines()
        figures = merge(figures, [labelled(line, arguments.keep[1]) for line in lines if line.startswith("{")])
    elif not arguments.page_only:
        for name in arguments.names or QUICK:
            figures = merge(figures, run(QUICK[name]))
    RESULTS.write_text("".join(json.dumps(figure) + "\n" for figure in figures))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{as_table(figures)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
