"""Compare the metrics of two runs step by step: `python -m scripts.compare_runs RUN OTHER [--tolerance 1e-6]`.

Two runs with one `sampling_seed` make the same steps if the code between them means the same. Durations, speeds and
memory differ between any two runs and are left out. Prints each metric that differs by more than the tolerance, with
the first step where it does and its largest difference; the exit status is 1 if there is one.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import inf, isclose
from pathlib import Path

from cua_rl.reporting.json_lines import read_records

_MACHINE = ("time/", "trainer/", "device/", "async/", "rollout/duration_s/")
"""Prefixes of metrics that depend on the machine and its load."""


def load_steps(folder: Path) -> dict[int, dict[str, float]]:
    """Per step the metrics of a run that its machine does not decide."""
    steps: dict[int, dict[str, float]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        values = {name: value for name, value in record.items() if isinstance(value, int | float)}
        steps.setdefault(int(values.pop("step")), {}).update(
            {name: value for name, value in values.items() if not name.startswith(_MACHINE)}
        )
    return steps


def differences(
    run: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]], tolerance: float
) -> dict[str, tuple[int, float]]:
    """Per metric that differs: the first step where it does, and its largest difference (inf if one run lacks it)."""
    found: dict[str, tuple[int, float]] = {}
    for step in sorted({*run, *other}):
        left, right = run.get(step, {}), other.get(step, {})
        for name in {**left, **right}:
            if name not in left or name not in right:
                gap = inf
            elif isclose(left[name], right[name], rel_tol=tolerance, abs_tol=tolerance):
                continue
            else:
                gap = abs(left[name] - right[name])
            first, largest = found.get(name, (step, 0.0))
            found[name] = first, max(largest, gap)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; 0 if nothing does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative, and absolute below 1")
    options = parser.parse_args(argv)
    run, other = load_steps(options.run), load_steps(options.other)
    found = differences(run, other, options.tolerance)
    for name, (step, gap) in sorted(found.items(), key=lambda item: item[1][0]):
        print(f"{name}: from step {step}, largest difference {gap:.3g}")
    print(f"{len({*run, *other})} steps, {len(found)} metrics differ by more than {options.tolerance:g}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
