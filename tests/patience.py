"""Time limits of tests, in seconds of an idle machine: on a busy one they are as many times longer as it is slower.

As a pytest plugin, it applies to the limit of every test, which pytest-timeout sets.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from pytest_timeout import (  # pyright: ignore[reportMissingTypeStubs]
    timeout_sigalrm,  # pyright: ignore[reportUnknownVariableType]
)

SPARE = 4.0
"""How many times slower a machine may become after it was looked at."""
_LOOK_S = 15.0


def slowness() -> float:
    """How many processes of the last minute shared a core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience(seconds: float) -> float:
    """The limit for something that takes up to `seconds` on an idle machine, as busy as this one is, and becomes."""
    return seconds * SPARE * slowness()


class IdleClock:
    """Counts the seconds that an idle machine would have taken; whoever waits looks at it every now and then."""

    def __init__(self, now: Callable[[], float] = time.monotonic, slowness: Callable[[], float] = slowness) -> None:
        self._now, self._slowness = now, slowness
        self._idle_s, self._looked_at = 0.0, now()

    def look(self) -> float:
        """The seconds since it was made."""
        now = self._now()
        self._idle_s += (now - self._looked_at) / self._slowness()
        self._looked_at = now
        return self._idle_s


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Instead of one alarm at the limit: look every few seconds how much of it an idle machine would have used."""
    clock = IdleClock()

    def look(*_: object) -> None:
        __tracebackhide__ = True
        if clock.look() > settings.timeout:
            signal.setitimer(signal.ITIMER_REAL, 0)  # or it rings again while the failure is reported
            timeout_sigalrm(item, settings)

    signal.signal(signal.SIGALRM, look)
    every_s = min(_LOOK_S, settings.timeout)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True
