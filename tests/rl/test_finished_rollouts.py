"""What a loop keeps of the rollouts that it has trained: screenshots of a step may be gigabytes."""

import gc
from pathlib import Path

import pytest

from cua_rl.events import Event, GroupEnded, StepTrained
from cua_rl.rl import async_loop, sync_loop
from cua_rl.types.rollout import Rollout
from tests.fakes import FakeTrainer
from tests.rl.async_world import ServedVersions, World
from tests.rl.test_sync_loop import settings


def all_rollouts() -> list[Rollout]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Rollout]


class Names:
    """A recorder that keeps the ids of rollouts alone."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.trained: set[str] = set()

    async def record(self, event: Event) -> None:
        match event:
            case GroupEnded(group=group):
                self.ended |= {rollout.rollout_id for rollout in group.rollouts}
            case StepTrained(training_logprobs=logprobs):
                self.trained |= set(logprobs)
            case _:
                return

    async def flush(self) -> None:
        return


class Checkpoints(ServedVersions):
    """Looks, at each checkpoint, which trained rollouts are still in memory."""

    def __init__(self, trainer: FakeTrainer, names: Names) -> None:
        super().__init__(trainer)
        self.names = names
        self.others = {id(found) for found in all_rollouts()}
        self.kept: list[set[str]] = []

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]:
        alive = {found.rollout_id for found in all_rollouts() if id(found) not in self.others}
        self.kept.append(alive & self.names.trained)
        return await super().save_checkpoint(step, is_interim=is_interim)


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_trained_rollouts_are_gone_while_the_next_ones_are_sampled(max_lag: int) -> None:
    world, names = World(), Names()
    world.policy = policy = Checkpoints(world.trainer, names)
    loop = world.parts(recorder=names)

    if max_lag:
        await async_loop.train(settings(max_steps=3), loop, max_lag=max_lag, limit=world.limit)
    else:
        await sync_loop.train(settings(max_steps=3), loop)

    assert len(names.trained) == 12
    assert policy.kept == [set(), set(), set()]
