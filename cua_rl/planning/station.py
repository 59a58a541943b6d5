"""Hardware in a simulation: works on several requests at a time, more slowly the more there are."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

_TOLERANCE_S = 1e-6


@dataclass
class Station:
    """Does one unit of each of n requests in `alone_s` + n * `each_s` seconds, as a model server decodes a batch.

    Requests beyond `capacity` wait for their turn. While one of the `neighbours` is busy, both have half of the
    hardware, so that a trainer beside a server on one GPU takes twice as long, and so does the server.
    """

    alone_s: float
    each_s: float
    capacity: float = inf
    neighbours: list["Station"] = field(default_factory=list["Station"])
    busy_s: float = 0.0
    _progress: float = 0.0
    """Units done so far of a request that has been in progress since the beginning."""
    _settled_at: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _num_admitted: int = 0
    _present: list[tuple[float, int, asyncio.Future[None]]] = field(
        default_factory=list[tuple[float, int, asyncio.Future[None]]]
    )
    """A heap: the progress at which the request ends, a number to break ties, and who waits for it."""
    _waiting: deque[tuple[float, asyncio.Future[None]]] = field(
        default_factory=deque[tuple[float, asyncio.Future[None]]]
    )

    @property
    def is_busy(self) -> bool:
        return bool(self._present)

    async def work(self, units: float) -> None:
        """Return when this many units are done."""
        done = asyncio.get_running_loop().create_future()
        self._settle_all()
        self._waiting.append((units, done))
        self._admit()
        self._reschedule_all()
        await done

    def settle(self) -> None:
        """Account for the time since the last change."""
        now = asyncio.get_running_loop().time()
        elapsed, self._settled_at = now - self._settled_at, now
        if self._present:
            self.busy_s += elapsed
            self._progress += elapsed / self._unit_s

    def reschedule(self) -> None:
        """Wake up when the next request ends at the present speed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._present:
            self._timer = asyncio.get_running_loop().call_later(self._due_s, self._finish)

    @property
    def _unit_s(self) -> float:
        """Seconds per unit of each request at this moment."""
        share = 0.5 if any(neighbour.is_busy for neighbour in self.neighbours) else 1.0
        return (self.alone_s + self.each_s * len(self._present)) / share

    @property
    def _due_s(self) -> float:
        return max(0.0, self._present[0][0] - self._progress) * self._unit_s

    def _admit(self) -> None:
        while self._waiting and len(self._present) < self.capacity:
            units, done = self._waiting.popleft()
            self._num_admitted += 1
            heappush(self._present, (self._progress + units, self._num_admitted, done))

    def _finish(self) -> None:
        self._settle_all()
        # the loop runs timers up to its clock's resolution early: without a tolerance, time would stand still
        while self._present and self._due_s <= _TOLERANCE_S:
            done = heappop(self._present)[2]
            if not done.done():
                done.set_result(None)
        self._admit()
        self._reschedule_all()

    def _settle_all(self) -> None:
        for station in (self, *self.neighbours):
            station.settle()

    def _reschedule_all(self) -> None:
        for station in (self, *self.neighbours):
            station.reschedule()
