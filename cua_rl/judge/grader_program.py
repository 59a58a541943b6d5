"""Runs the `grade` function of a Python grader in a sandboxed process: payload on standard input, result in a file.

It imports nothing of this package: its process may read only this file and the interpreter.
"""

import json
import math
import os
import resource
import signal
import sys
import traceback

_LAST_S = 10  # to report that the time was used up


def main() -> None:
    """Write {"grade": number}, or {"error": text} if the source raised or returned something else."""
    told = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (told["max_memory_bytes"],) * 2)
    signal.signal(signal.SIGXCPU, _end)
    resource.setrlimit(resource.RLIMIT_CPU, (told["max_cpu_s"], told["max_cpu_s"] + _LAST_S))
    found: dict[str, object] = {}
    try:
        names: dict[str, object] = {"__name__": "grader"}
        exec(compile(told["source"], "<grader>", "exec"), names)
        grade = names["grade"](told["sample"], told["item"])  # type: ignore[operator]
        if isinstance(grade, bool) or not isinstance(grade, int | float) or not math.isfinite(grade):
            raise TypeError(f"grade returned {grade!r}, expected a finite number")
        found["grade"] = float(grade)
    except BaseException as error:  # noqa: BLE001 - the source is a user's, and may even leave
        found["error"] = "".join(traceback.format_exception_only(error)).strip()[-1000:]
    with open(os.environ["GRADE_PATH"], "w", encoding="utf-8") as result:
        json.dump(found, result)


def _end(*_: object) -> None:
    raise TimeoutError("grade used all of its processor time")


if __name__ == "__main__":
    main()
