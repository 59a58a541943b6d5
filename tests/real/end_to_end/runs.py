"""Training runs as a user starts them: a command in a process of its own, watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.patience import IdleClock, patience

SMALL = (
    "group_size=4",
    "groups_per_batch=4",
    "num_eval_rollouts=8",
    "eval_every=0",
    "save_every=1",
    "parity_limit=0.005",
)
DEADLINE_S = 280.0
"""Of an idle machine."""


class Run:
    """One attempt at a run in `folder`; `owned` are the processes that it started."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._output = folder.parent / f"{folder.name}.out"
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cua_rl.recipes.train", f"log_path={folder}", *SMALL, *options],
                env={name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def owned(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Poll until `condition` holds; the run must not end before."""
        clock = IdleClock()
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended early:\n{self.output()}"
            assert clock.look() < DEADLINE_S, f"waited too long:\n{self.output()}"
            time.sleep(0.1)
        return value

    def finish(self) -> int:
        return self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def output(self) -> str:
        return self._output.read_text()[-4000:]

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of trained steps so far."""
        return [record for record in read_lines(self.folder / "metrics.jsonl") if "reward/mean" in record]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete JSON lines of a file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def survivors(processes: list[psutil.Process], timeout_s: float = 20.0) -> list[psutil.Process]:
    """Those that are still alive after a while."""
    _, alive = psutil.wait_procs(processes, timeout=patience(timeout_s))
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
