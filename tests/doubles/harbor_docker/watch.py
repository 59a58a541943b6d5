"""Runs Harbor's wrapper, then prints what it asked of the `docker` beside this file: `python watch.py WRAPPER`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]).parent))
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    sys.stderr.write((Path.home() / "docker.log").read_text())
