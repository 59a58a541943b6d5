"""An event loop whose clock stands still and jumps to whatever is due next: an hour of waiting takes no time, and the
machine's speed changes no figure.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    jumped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout:
            self.jumped_s += timeout
        return events or super().select(0 if timeout is not None else None)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped_s


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which must not wait for threads or sockets, in a loop of its own."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)
