"""What an attack finds, and what attacks share."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import httpx
import psutil

from scripts.red_team.targets import ALL_CANARIES, Devices, LiveRun, peak_bytes

Verdict = Literal["held", "OPEN", "not tried", "unclear"]
MAX_GROWTH_BYTES = 150 * 2**20
MAX_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one attack."""

    row: int
    attack: str
    expected: str
    got: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is attacked."""

    run: LiveRun
    devices: Devices | None


Findings = Iterator[Finding]


def check(row: int, attack: str, expected: str, got: object, is_held: bool) -> Finding:
    """A finding whose verdict is known."""
    text = " ".join(str(got).split())[:110]
    return Finding(row=row, attack=attack, expected=expected, got=text, verdict="held" if is_held else "OPEN")


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


JSON = {"Content-Type": "application/json"}


def arrays(num_mb: int) -> Iterator[bytes]:
    yield b"["
    for _ in range(num_mb * 4):
        yield b"[]," * 83_333


def growth_bytes(pid: int, attack: Callable[[], int]) -> tuple[int, int]:
    """How far the peak of a process's memory rose, and the answer's status, 0 if the server hung up."""
    before, status = peak_bytes(pid), 0
    with suppress(httpx.TransportError):
        status = attack()
    time.sleep(0.5)
    return peak_bytes(pid) - before, status


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
