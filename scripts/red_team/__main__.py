"""Attack a live run in the ways that docs/security.md promises to withstand, and print what came of each.

    python -m scripts.red_team                # starts a run, two desktops, a browser, a site and a Tinker service
    python -m scripts.red_team rows=1,4,13    # these rows only

The exit status is 1 if an attack got through, or broke off without a result. Attacks of another user are those of
one that nobody has, and need root, which can become it; without root, they are not tried.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import chz
from rich.console import Console
from rich.table import Table

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.command_line.recipe import report_error
from cua_rl.types.errors import CuaError, boundary
from scripts.red_team.devices import attack_browser, attack_files, attack_other_desktop, attack_site
from scripts.red_team.doors import (
    attack_connections,
    attack_gateway_address,
    attack_gateway_bodies,
    attack_gateway_texts,
    attack_image,
    attack_ingest,
    attack_monitor_bodies,
    attack_queries,
    attack_session,
)
from scripts.red_team.findings import Finding, Findings, Targets
from scripts.red_team.graders import attack_grader
from scripts.red_team.installation import attack_installation
from scripts.red_team.messages import attack_cluster, attack_messages
from scripts.red_team.run_folders import attack_run_folders
from scripts.red_team.services import (
    attack_agent,
    attack_database,
    attack_ends,
    attack_environment_file,
    attack_inspection,
    attack_model_server,
    attack_secrets,
    attack_trainer,
)
from scripts.red_team.tinker import attack_tinker_run, attack_tinker_service

ATTACKS: tuple[tuple[int, Callable[[Targets], Findings]], ...] = (
    (21, attack_installation),
    (16, attack_run_folders),
    (3, attack_messages),
    (3, attack_cluster),
    (23, attack_tinker_run),
    (22, attack_tinker_service),
    (14, attack_environment_file),
    (24, attack_grader),
    (1, attack_database),
    (2, attack_browser),
    (19, attack_site),
    (3, attack_trainer),
    (4, attack_model_server),
    (6, attack_gateway_address),
    (7, attack_agent),
    (20, attack_inspection),
    (9, attack_other_desktop),
    (8, attack_files),
    (25, attack_queries),
    (11, attack_ingest),
    (12, attack_session),
    (13, attack_secrets),
    (5, attack_gateway_bodies),
    (17, attack_gateway_texts),
    (10, attack_monitor_bodies),
    (18, attack_connections),
    (14, attack_image),
    (14, attack_ends),
)
"""In this order: what needs no run and what only looks comes first, and what ends the run comes last."""
_ROWS = sorted({row for row, _ in ATTACKS})


@chz.chz
class RedTeamConfig:
    """Which attacks are tried."""

    rows: list[int] = chz.field(default_factory=lambda: list(_ROWS), doc="rows of the table in docs/security.md")
    folder: str | None = chz.field(default=None, doc="folder that keeps the run; None is one that is removed")


def try_attacks(targets: Targets, rows: list[int]) -> list[Finding]:
    """All findings; an attack that breaks off is unclear, never held."""
    findings: list[Finding] = []
    for row, attack in ATTACKS:
        if row not in rows:
            continue
        print(f"{attack.__name__} ...", file=sys.stderr, flush=True)
        try:
            with boundary(CuaError, attack.__name__):
                findings.extend(attack(targets))
        except CuaError as error:
            got = " ".join(str(error).split())[:110]
            findings.append(Finding(row=row, attack=attack.__name__, expected="", got=got, verdict="unclear"))
    return findings


def print_findings(findings: list[Finding]) -> None:
    """The table, in the order of rows."""
    table = Table(title=f"{'root' if os.geteuid() == 0 else 'ordinary user'}, {len(findings)} attacks")
    for heading in ("row", "attack", "expected", "got", "verdict"):
        table.add_column(heading)
    for each in sorted(findings, key=lambda each: each.row):
        table.add_row(str(each.row), each.attack, each.expected, each.got, each.verdict)
    Console(width=None if sys.stdout.isatty() else 200).print(table, markup=False)


def attack_run(config: RedTeamConfig) -> list[Finding]:
    """Start what is attacked, attack it, and end it."""
    folder = Path(config.folder or tempfile.mkdtemp(prefix="red_team_")).absolute()
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # other users attack from here
    targets = Targets(folder)
    try:
        return try_attacks(targets, config.rows)
    finally:
        targets.stop()
        if config.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Attack and report; 1 if anything got through."""
    # no event loop: attacks of other users fork
    try:
        config = parse_command_line(RedTeamConfig, sys.argv[1:])
    except CuaError as error:
        return report_error(error)
    findings = attack_run(config)
    print_findings(findings)
    return int(any(each.verdict in ("OPEN", "unclear") for each in findings))


if __name__ == "__main__":
    sys.exit(main())
