"""A rollout worker whose rollouts sleep: the members of `scripts.chaos_members`."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cua_rl.events import NoRecorder
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.rollout import AdapterRef, Reward, Rollout, StopReason
from cua_rl.workers.worker import Workplace


@dataclass
class SleepingPlace:
    """Where rollouts sleep. Each writes a line at its begin and its end, into one file of all members.

    While there is a file with the member's name and `.broken`, each is a fault at once, as with broken devices.
    """

    name: str
    folder: Path
    mean_s: float
    current: AdapterRef | None = None

    @property
    def used(self) -> frozenset[AdapterRef]:
        return frozenset()

    def follow(self, adapter: AdapterRef) -> None:
        self.current = adapter

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout."""
        started = time.time()
        self._note("began", job)
        is_broken = (self.folder / f"{self.name}.broken").exists()
        if not is_broken:
            await asyncio.sleep(Random(job.rollout_id).expovariate(1 / self.mean_s))
        self._note("broke" if is_broken else "ended", job)
        return Rollout(
            rollout_id=job.rollout_id,
            task_id=job.task.task_id,
            seed=job.task.seed,
            group_index=job.group_index,
            member_index=job.member_index,
            device_id="bed",
            turns=(),
            stop_reason=StopReason.DEVICE_ERROR if is_broken else StopReason.FINISHED,
            answer=None,
            validation=None,
            reward=None if is_broken else Reward(total=0.0, parts={}),
            error="it is broken" if is_broken else None,
            started_at=started,
            duration_s=time.time() - started,
        )

    def _note(self, what: str, job: RolloutJob) -> None:
        version = -1 if self.current is None else self.current.policy_version
        line = f"{what} {job.rollout_id} {self.name} {os.getpid()} {version}\n"
        file = os.open(self.folder / "members.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())  # whole, as it is short
        finally:
            os.close(file)


@asynccontextmanager
async def open_place(name: str, folder: Path, mean_s: float) -> AsyncGenerator[Workplace]:
    """The workplace of a member."""
    place = SleepingPlace(name, folder, mean_s)
    yield Workplace(runner=place, recorder=NoRecorder(), policies=place)
