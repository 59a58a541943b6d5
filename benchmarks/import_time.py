"""How long `import cua_rl.recipes.train` takes in a fresh interpreter: one JSON line, the best of several tries.

    python -m benchmarks.import_time

This is what `--help` and a refused command line wait for; the run itself is imported after the command line is parsed.
"""

import json
import subprocess
import sys

ATTEMPTS = 5
PROGRAM = "import time; began = time.perf_counter(); import cua_rl.recipes.train; print(time.perf_counter() - began)"


def main() -> None:
    """Measure and print."""
    seconds = [
        float(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)
        for _ in range(ATTEMPTS)
    ]
    print(json.dumps({"figure": "import_time_s", "best": round(min(seconds), 3), "target": 1.0, "attempts": ATTEMPTS}))


if __name__ == "__main__":
    main()
