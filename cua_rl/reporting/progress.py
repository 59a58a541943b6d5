"""Progress on the console: one line per step, and a live bar in a terminal."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cua_rl.reporting.step_line import format_duration, format_evaluation_line, format_group_line, format_step_line


class ProgressDisplay:
    """Shows set-up phases, steps and evaluations; a context manager. `first_step` is the first one of this attempt."""

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._first_step = first_step
        self._console = console or Console(soft_wrap=True)
        self._clock = clock
        self._began_at: float | None = None
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

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
        """A step is complete."""
        eta_s = self._eta_s(step, metrics)
        self.note(format_step_line(step, self._total_steps, metrics, eta_s))
        if self._progress is not None and self._bar is not None:
            success = metrics.get("reward/success_rate")
            doing = "" if success is None else f"success {success:.3f}"
            left = "" if eta_s is None else f"{format_duration(eta_s)} left"
            self._progress.update(self._bar, completed=step, doing=doing, left=left)

    def group(self, index: int, rewards: Sequence[float]) -> None:
        """A group of the running step has ended."""
        self.note(format_group_line(index, rewards))

    def evaluation(self, label: str, suite: str, metrics: Mapping[str, float]) -> None:
        """An evaluation is done; `metrics` has `eval/<suite>/...`."""
        self.note(format_evaluation_line(label, suite, metrics))

    def _eta_s(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Remaining seconds at the average pace so far, evaluations included; before that, at the last step's pace."""
        num_left = self._total_steps - step
        if self._began_at is not None:
            return (self._clock() - self._began_at) / (step - self._first_step + 1) * num_left
        pace_s = metrics.get("time/step_s")
        return None if pace_s is None else pace_s * num_left

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
