"""What an attack finds, and what attacks share."""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import psutil

from cua_rl.types.errors import CuaError
from scripts.red_team.floods import Cost, small_cost
from scripts.red_team.targets import ALL_CANARIES, CANARIES, Devices, LiveRun, TinkerProcess

Verdict = Literal["held", "OPEN", "not promised", "not tried", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one attack."""

    row: int
    attack: str
    expected: str
    got: str
    verdict: Verdict


class Targets:
    """What is attacked: each starts when an attack first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self) -> dict[str, str]:
        """Ours without a database, with canaries."""
        ours = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "TMPDIR")}
        return ours | CANARIES | {"HF_HUB_OFFLINE": "1"}

    @cached_property
    def run(self) -> LiveRun:
        """A training run."""
        run = LiveRun(self.folder, self.environment())
        try:
            run.start()
        except BaseException:
            run.stop()
            raise
        return run

    @cached_property
    def tinker(self) -> TinkerProcess:
        """A Tinker service."""
        service = TinkerProcess(self.folder, self.environment())
        try:
            service.start()
        except BaseException:
            service.stop()
            raise
        return service

    @cached_property
    def devices(self) -> Devices | None:
        """Two desktops, a browser and a site, None where they cannot be had."""
        try:
            return Devices(self.folder, self.environment())
        except CuaError as error:
            print(f"no desktops or browser: {error}", flush=True)
            return None

    def stop(self) -> None:
        """End what was started."""
        started = vars(self)
        if "devices" in started and self.devices is not None:
            self.devices.stop()
        if "tinker" in started:
            self.tinker.stop()
        if "run" in started:
            self.run.stop()


Findings = Iterator[Finding]


def check(row: int, attack: str, expected: str, got: object, is_held: bool) -> Finding:
    """A finding whose verdict is known."""
    text = " ".join(str(got).split())[:110]
    return Finding(row=row, attack=attack, expected=expected, got=text, verdict="held" if is_held else "OPEN")


def check_all(row: int, attack: str, looked_at: Collection[object], bad: Collection[object]) -> Finding:
    """A finding about all that was looked at; nothing to look at proves nothing."""
    got = sorted(map(str, bad)) or ("none" if looked_at else "nothing to look at")
    return check(row, attack, "none", got, bool(looked_at) and not bad)


def check_cost(row: int, attack: str, cost: Cost, num_mb: int = 0) -> Finding:
    """Whether an attack costs others little."""
    return check(row, attack, small_cost(num_mb), cost, cost.is_small(num_mb))


def skipped(row: int, attack: str, reason: str) -> Finding:
    """An attack that cannot be tried here."""
    return Finding(row=row, attack=attack, expected="", got=f"not tried: {reason}", verdict="not tried")


def guest_users(targets: Targets) -> dict[str, int]:
    """Users of what models and agents operate."""
    if targets.devices is None:
        return {}
    below = psutil.Process(targets.devices.process.pid).children(recursive=True)
    names = ("openbox", "Xvfb", "chrome", "chromium")
    return {p.name(): p.uids().real for p in below if any(name in p.name() for name in names) and p.uids().real != 0}


def canaries_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        text = json.dumps(process.environ())
        return [canary for canary in ALL_CANARIES if canary in text]
    return []
