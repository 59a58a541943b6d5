"""The findings of the doctor: a table for people, and a file to attach to a bug report."""

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cua_rl.host.masking import known_secrets, mask_known, mask_secrets
from cua_rl.reporting.json_lines import write_text
from cua_rl.types.errors import first_error

logger = logging.getLogger(__name__)

Verdict = Literal["ok", "warn", "fail", "not tried"]
_STYLES: Mapping[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "not tried": "dim"}
_REMEDIES: Mapping[str, str] = {
    r"No available memory for the cache|less than desired GPU memory": "leave the GPU to the run alone, or lower "
    "server.max_model_len and server.max_pixels",
    r"out of memory|OutOfMemoryError|STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation": "lower server.max_model_len, "
    "server.gpu_memory_utilization or trainer.micro_batch_tokens",
    r"driver version is insufficient|driver on your system is too old": "update the driver to 580 or newer, or run "
    "make setup again, which finds builds for it",
    r"no kernel image": "use a GPU of compute capability 7.5 or higher",
    r"find C compiler|Python\.h: No such": "install them: sudo apt-get install gcc libc6-dev python3-dev",
    # stricter than the name, which healthy logs contain
    r"NCCL error|nccl\w+Error|DistBackendError": "give a container more shared memory (--shm-size=8g), see what "
    "NCCL_DEBUG=INFO says in the logs, and try NCCL_P2P_DISABLE=1",
    r"No space left on device": "free disk space, or put log_dir elsewhere",
}
"""What libraries say when they fail on a new machine, and what to do."""
_LONGEST_CELL = 300  # the file has all of it, with logs of hundreds of lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    got: str
    do: str = ""
    """What to do about it; empty if all is well."""
    figures: Mapping[str, object] = field(default_factory=dict[str, object])
    """Measurements, for the file."""
    seconds: float = 0.0


@dataclass
class Diagnosis:
    """Findings in the order of their checks."""

    folder: Path
    """Where the logs of checked processes are."""
    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])

    async def check(self, name: str, find: Callable[[], Awaitable[Finding]]) -> Finding:
        """Run one check; whatever it raises becomes its finding, so that the next checks still run."""
        clock = time.monotonic()
        try:
            finding = await find()
        except Exception as error:  # a library that breaks on this machine is what is looked for
            logger.info("check failed name=%s", name, exc_info=error)
            finding = self._failure(error)
        self.findings[name] = replace(finding, seconds=round(time.monotonic() - clock, 1))
        return self.findings[name]

    def _failure(self, error: BaseException) -> Finding:
        error = first_error(error)
        said = mask_known(f"{type(error).__name__}: {error}")
        _, _, rest = said.partition(", got ")
        advice = rest.partition("; ")[2]  # messages of this project say what to do
        known = next((remedy for cause, remedy in _REMEDIES.items() if re.search(cause, said)), "")
        unknown = f"read the logs in {self.folder / 'logs'}, and report it with doctor.json"
        return Finding(verdict="fail", got=said, do=advice or known or unknown)

    def failed(self) -> list[str]:
        return [name for name, finding in self.findings.items() if finding.verdict == "fail"]

    def show(self, console: Console) -> None:
        table = Table("check", "verdict", "got", "do")
        for name, finding in self.findings.items():
            verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
            table.add_row(name, verdict, Text(first_line(finding.got)), Text(first_line(finding.do)))
        console.print(table)

    def write(self, path: Path, about: Mapping[str, object]) -> None:
        """Write the findings and what they are about as JSON, without secrets."""
        findings = [{"name": name, **asdict(finding)} for name, finding in self.findings.items()]
        report = mask_secrets({**about, "findings": findings}, known_secrets())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=2) + "\n")


def first_line(text: str) -> str:
    """What a table has room for."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_CELL else line[:_LONGEST_CELL] + "..."
