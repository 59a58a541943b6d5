"""Progress on the console: one line per step, and a live bar in a terminal."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cua_rl.host.masking import mask_known
from cua_rl.reporting.pace import Attempt, Span, TimeLeft, evaluations_due
from cua_rl.reporting.step_line import (
    format_duration,
    format_evaluation_line,
    format_group_line,
    format_left,
    format_step_line,
)


@asynccontextmanager
async def starting(
    what: str, say: Callable[[str], None], *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[None]:
    """Say what is being started, every few seconds for how long, and when it is ready."""
    began = clock()
    say(f"starting {what}")

    async def count() -> None:
        while True:
            await asyncio.sleep(every_s)
            say(f"starting {what}, {format_duration(clock() - began)} so far")

    counting = asyncio.create_task(count(), name="count-seconds")
    try:
        yield
    finally:
        counting.cancel()
        await asyncio.wait([counting])
    say(f"{what}: ready after {format_duration(clock() - began)}")


class ProgressDisplay:
    """Shows set-up phases, steps and evaluations; a context manager. `first_step` is the first one of this attempt.

    `eval_every` is None for a run without evaluations.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 1,
        eval_every: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._first_step = first_step
        self._eval_every = eval_every
        self._steps: list[Span] = []
        self._evaluations: list[Span] = []
        self._console = console or Console(soft_wrap=True)
        self._clock = clock
        self._began_at: float | None = None
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(mask_known(text), markup=False, highlight=False)

    def status(self, text: str) -> None:
        """Say what the run is doing: "starting the model server"."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, doing=text)
        else:
            self.note(text)

    def begin_steps(self) -> None:
        """The first step starts; the estimate of the remaining time is based on the time since then."""
        self._began_at = self._clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._left(step, metrics)
        self.note(format_step_line(step, self._total_steps, metrics, left))
        if self._progress is not None and self._bar is not None:
            success = metrics.get("reward/success_rate")
            doing = "" if success is None else f"success {success:.3f}"
            text = "" if left is None else f"{format_left(left)} left"
            self._progress.update(self._bar, completed=step, doing=doing, left=text)

    def group(self, index: int, rewards: Sequence[float]) -> None:
        """A group of the running step has ended."""
        self.note(format_group_line(index, rewards))

    def evaluation(self, label: str, suite: str, metrics: Mapping[str, float]) -> None:
        """An evaluation is done; `metrics` has `eval/<suite>/...`."""
        self.note(format_evaluation_line(label, suite, metrics))
        if (duration_s := metrics.get(f"eval/{suite}/time_s")) is not None:
            self.evaluation_ended(duration_s)

    def evaluation_ended(self, duration_s: float) -> None:
        self._evaluations.append((self._clock() - duration_s, self._clock()))

    def _left(self, step: int, metrics: Mapping[str, float]) -> TimeLeft | None:
        """What the remaining steps and evaluations take, at the pace of this attempt."""
        now = self._clock()
        duration_s = metrics.get("time/step_s", 0.0)
        self._steps.append((now - duration_s, now))
        began_at = now - duration_s if self._began_at is None else self._began_at
        attempt = Attempt(began_at=began_at, steps=self._steps, evaluations=self._evaluations)
        total, every = self._total_steps, self._eval_every
        owed = [] if every is None else evaluations_due(eval_every=every, after=step, total_steps=total)
        return attempt.time_left(num_steps=total - step, owed=owed, total_steps=total, now=now)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[doing]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bar = self._progress.add_task(
                "", total=self._total_steps, completed=self._first_step - 1, doing="", left=""
            )
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
