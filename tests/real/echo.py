"""An actor that imports little: each begins in a process of its own."""

import asyncio
import os
from pathlib import Path

from cua_rl.host.scratch import make_scratch_folder


class Echo:
    """An actor."""

    def __init__(self, num_waiting: int = 0) -> None:
        self.num_waiting = num_waiting

    async def pid(self) -> int:
        return os.getpid()

    async def same(self, value: object) -> object:
        return value

    async def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def wait(self) -> None:
        self.num_waiting += 1
        await asyncio.Event().wait()

    async def count(self) -> int:
        return self.num_waiting

    async def fail(self, error: Exception) -> None:
        raise error

    async def make_folder(self) -> Path:
        return make_scratch_folder("kept")

    async def close(self) -> None:
        self.num_waiting = 0
