"""An event loop whose clock jumps to the next timer when nobody has anything to do: hours in seconds, exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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

    def jump(self, timeout_s: float | None) -> bool:
        """Move the clock, unless a thread still works; True if the selector need not wait."""
        if self._num_jobs or timeout_s is None:
            return False
        self._now += max(0.0, timeout_s)
        return True


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.jump(timeout):
            return []
        return super().select(None if timeout is None else min(timeout, 0.01))


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
