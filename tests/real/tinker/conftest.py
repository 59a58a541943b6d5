"""Tests with the tinker SDK and its cookbook, which are in environments of their own: `make test-cookbook`."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parents[3]
PACKAGES = next(iter(ROOT.glob(".venv-tinker/lib/python*/site-packages")), None)
COOKBOOK = ROOT / ".venv-cookbook/bin/python"
KEY = "tml-key-of-the-tests"
ENVIRONMENT = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}

# `make test-tinker` and `make test-cookbook` make the environments first
collect_ignore_glob = [] if PACKAGES else ["test_*.py"]
if not (ROOT / ".venv-cookbook/.done").exists():
    collect_ignore_glob.append("test_cookbook.py")


@contextmanager
def serving(folder: Path, *settings: str) -> Generator[str]:
    """The address of a service that runs in `folder`."""
    log_path = folder / "out.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cua_rl.recipes.serve_tinker", "port=0", f"log_path={folder / 'run'}", *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
    try:
        limit = time.monotonic() + patience(120)
        while (found := re.search(r"TINKER_BASE_URL=(\S+)", log_path.read_text())) is None:
            assert process.poll() is None, log_path.read_text()[-3000:]
            assert time.monotonic() < limit, log_path.read_text()[-3000:]
            time.sleep(0.5)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(patience(60))
