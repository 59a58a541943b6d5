"""Device metrics: creations, leases and faults since the last reading."""

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cua_rl.metrics import mean_of
from cua_rl.types.errors import DeviceError


@dataclass(slots=True)
class PoolMeter:
    """Counts for one pool of at most `max_devices` devices."""

    max_devices: int
    num_leased: int = 0
    num_alive: int = 0
    num_reused: int = 0
    _most_leased: int = 0
    _make_s: list[float] = field(default_factory=list[float])
    _wait_s: list[float] = field(default_factory=list[float])
    _busy_s: float = 0.0
    _faults: Counter[str] = field(default_factory=Counter[str])
    _since: float = field(default_factory=time.monotonic)
    _begun: dict[int, float] = field(default_factory=dict[int, float])
    _num_leases: int = 0

    @contextmanager
    def lease(self, wait_s: float) -> Generator[None]:
        """A lease that has its device, after `wait_s` seconds of waiting."""
        self.num_leased += 1
        self._num_leases += 1
        self._most_leased = max(self._most_leased, self.num_leased)
        self._wait_s.append(wait_s)
        key = self._num_leases
        self._begun[key] = time.monotonic()
        try:
            yield
        finally:
            self.num_leased -= 1
            self._busy_s += time.monotonic() - self._begun.pop(key)

    def count_made(self, make_s: float) -> None:
        """A device was made in `make_s` seconds."""
        self.num_alive += 1
        self._make_s.append(make_s)

    def count_closed(self) -> None:
        self.num_alive -= 1

    def count_fault(self, error: DeviceError | TimeoutError) -> None:
        self._faults[error.kind if isinstance(error, DeviceError) else "time_limit"] += 1

    def take(self) -> dict[str, float]:
        """The metrics since the last call."""
        now = time.monotonic()
        for key, began in self._begun.items():
            self._busy_s += now - began
            self._begun[key] = now
        metrics = {
            "device/num_leases": float(len(self._wait_s)),
            "device/num_made": float(len(self._make_s)),
            "device/num_reused": float(self.num_reused),
            "device/num_faults": float(self._faults.total()),
            "device/num_lost": float(self._faults["lost"]),
            "device/leased/max": float(self._most_leased),
            "device/lease_s/mean": mean_of(self._wait_s).value,
            "device/create_s/mean": mean_of(self._make_s).value,
            "device/create_s/max": max(self._make_s, default=0.0),
            "device/busy_frac": self._busy_s / max(1e-9, (now - self._since) * self.max_devices),
        } | {f"device/faults/{kind}": float(count) for kind, count in sorted(self._faults.items())}
        self._make_s, self._wait_s, self._busy_s, self._since = [], [], 0.0, now
        self._faults, self.num_reused, self._most_leased = Counter(), 0, self.num_leased
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """What one pool's meter said of a period."""

    pool: str
    device_s: float
    """Length of the period times the devices of the pool."""
    metrics: Mapping[str, float]


def merge_readings(readings: Sequence[MeterReading]) -> dict[str, float]:
    """The metrics of several pools and periods as those of one pool."""
    # Pools need not be busiest at the same time, so `device/leased/max` is an upper bound.
    merged: dict[str, float] = {}
    weights = {"device/lease_s/mean": "device/num_leases", "device/create_s/mean": "device/num_made"}
    for name in dict.fromkeys(name for reading in readings for name in reading.metrics):
        values = [(reading.metrics.get(name, 0.0), reading) for reading in readings]
        if name in weights or name == "device/busy_frac":
            shares = [reading.metrics.get(weights.get(name, ""), reading.device_s) for _, reading in values]
            weighted = sum(value * share for (value, _), share in zip(values, shares, strict=True))
            merged[name] = weighted / (sum(shares) or 1.0)
        elif name == "device/leased/max":
            most: dict[str, float] = {}
            for value, reading in values:
                most[reading.pool] = max(value, most.get(reading.pool, 0.0))
            merged[name] = sum(most.values())
        else:
            merged[name] = (max if name.endswith("/max") else sum)(value for value, _ in values)
    return merged
