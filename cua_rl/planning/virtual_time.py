"""An event loop whose clock jumps to the next timer when no task is ready: simulates hours in seconds, exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ASK_EVERY = 64  # a system call costs as much as a small step of a simulation; Ctrl-C may wait for so many


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Sleeping costs no time; work in threads costs no virtual time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._num_jobs = 0
        super().__init__(_JumpingSelector(self))  # pyright: ignore[reportArgumentType]

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self._num_jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._end_job)
        return future

    def _end_job(self, _: object) -> None:
        self._num_jobs -= 1

    @property
    def has_jobs(self) -> bool:
        """Whether a thread still works."""
        return self._num_jobs > 0

    def jump(self, timeout_s: float) -> None:
        """Move the clock."""
        self._now += timeout_s


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Asks the system only if a thread or a signal may be pending."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop
        self._num_calls = 0

    def select(self, timeout: float | None = None) -> Any:
        self._num_calls += 1
        may_skip = not self._loop.has_jobs and self._num_calls % _ASK_EVERY
        ready = [] if may_skip and timeout is not None else super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None and not self._loop.has_jobs:
            self._loop.jump(timeout)
            return []
        return super().select(None if timeout is None else min(timeout, 0.01))


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
