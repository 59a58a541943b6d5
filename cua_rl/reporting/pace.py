"""Step time and time left, the same on the console and in the monitor: the pace at which steps end, plus evaluations.

The pace is the time between step ends of one attempt, so that steps that overlap count once and the time before a
resume does not count. Evaluations that hold training up are taken out of it, and those still owed are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf

RECENT_STEPS = 10
_MOST_DUE = 10_000  # other systems may say any number of steps
Span = tuple[float, float]
"""Start and end in seconds; the end is infinite while it is in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Estimated seconds until the run is done; a lower bound while no evaluation shows how long one takes."""

    seconds: float
    is_lower_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The latest steps of one attempt and the evaluations of its run; times are of one clock."""

    began_at: float
    steps: Sequence[Span] = field(default=())
    evaluations: Sequence[Span] = field(default=())

    @property
    def step_time_s(self) -> float | None:
        """Mean time from step end to step end over the last ten, without evaluations that hold up training."""
        ends = self._ends()
        if not ends:
            return None
        return self._passed(ends[0], ends[-1]) / (len(ends) - 1)

    def time_left(self, *, num_steps: int, owed: Sequence[int], total_steps: int, now: float) -> TimeLeft | None:
        """What `num_steps` steps and the evaluations `owed` after these steps take; a running one is one of them.

        None where nothing is known to be left: before the first step, and in a first evaluation at the end.
        """
        pace_s = self.step_time_s
        if pace_s is None and num_steps:
            return None
        ends = self._ends()
        since_s = self._passed(ends[-1], now) if ends else 0.0
        steps_s = max(0.0, num_steps * (pace_s or 0.0) - min(since_s, pace_s or 0.0))
        done = [span for span in self.evaluations if span[1] < inf]
        if not done or not owed:
            return TimeLeft(seconds=steps_s, is_lower_bound=bool(owed)) if steps_s > 0 else None
        start, end = max(done, key=lambda span: span[1])
        # the one after the last step holds up the end of the run; others only what no step overlaps
        held_s = self._held_up(start, end)
        costs = [end - start if step >= total_steps else held_s for step in owed]
        begun = [now - span[0] for span in self.evaluations if span[1] == inf]
        costs = [max(0.0, cost - elapsed) for cost, elapsed in zip(costs, begun + [0.0] * len(costs), strict=False)]
        return TimeLeft(seconds=steps_s + sum(costs), is_lower_bound=False)

    def _ends(self) -> list[float]:
        """Ends of the last eleven steps; the attempt's start counts as one. Empty before the first."""
        ends = [self.began_at, *sorted(end for _, end in self.steps if end < inf)]
        return ends[-RECENT_STEPS - 1 :] if len(ends) > 1 else []

    def _passed(self, start: float, end: float) -> float:
        return max(0.0, end - start - self._held_up(start, end))

    def _held_up(self, start: float, end: float) -> float:
        """Seconds from `start` to `end` in which an evaluation runs and no step does."""
        cuts = {start, end} | {time for span in (*self.steps, *self.evaluations) for time in span if start < time < end}
        return sum(
            late - early
            for early, late in pairwise(sorted(cuts))
            if any(a <= early and late <= b for a, b in self.evaluations)
            and not any(a <= early and late <= b for a, b in self.steps)
        )


def evaluations_due(*, eval_every: int, after: int, total_steps: int) -> list[int]:
    """The steps from `after` on that an evaluation follows; the last step always. No more than anybody waits for."""
    regular = range(-(-max(1, after) // eval_every) * eval_every, total_steps, eval_every) if eval_every else ()
    return [*islice(regular, _MOST_DUE), *([total_steps] if after <= total_steps else [])]
