"""A fleet whose members join, leave and die at random: what is counted comes out exact."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from cua_rl.rollout.group import MAX_ATTEMPTS, GroupJob, run_group
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.rollout import Rollout, RolloutGroup, StopReason
from cua_rl.workers.fleet import Fleet
from cua_rl.workers.worker import RolloutWorker
from tests.fakes import FakeRecorder, make_task
from tests.jumping_time import run_jumping
from tests.workers.test_workers import PARAMS, SOURCE, FakeActor, FakeAdapters, FakePlace

NUM_MEMBERS, NUM_GROUPS, GROUP_SIZE, NUM_SLOTS = 64, 96, 8, 4
ROLLOUT_S, LIFE_S, AWAY_S = 60.0, 240.0, 30.0


@dataclass
class SleepingPlace(FakePlace):
    """Its rollouts take a while."""

    rng: Random = field(default_factory=Random)

    async def run(self, plan: RolloutJob) -> Rollout:
        self.gate.set()
        await asyncio.sleep(self.rng.expovariate(1 / ROLLOUT_S))
        return await super().run(plan)


async def live(fleet: Fleet, name: str, rng: Random, places: list[SleepingPlace], causes: Counter[str]) -> None:
    """Join, meet some end, be away for a while, and so on."""
    while True:
        await asyncio.sleep(rng.uniform(0.0, AWAY_S))
        place = SleepingPlace(name, rng=rng)
        places.append(place)
        worker = RolloutWorker(name, NUM_SLOTS, place.open)
        await worker.open()
        actor, cause = FakeActor(worker), rng.choice(("died", "stopped", "cut off", "broke"))

        async def meet_end(place: SleepingPlace = place, actor: FakeActor = actor, cause: str = cause) -> None:
            await asyncio.sleep(rng.expovariate(1 / LIFE_S))
            causes[cause] += 1
            match cause:
                case "died":
                    await actor.kill()
                case "stopped":
                    actor.is_stopped = True
                case "cut off":
                    actor.is_cut_off = True
                case _:
                    place.is_broken = True

        ending = asyncio.create_task(meet_end())
        try:
            await fleet.serve(name, NUM_SLOTS, actor)
        finally:
            ending.cancel()
            await worker.close()


def test_every_member_of_every_group_ends_once_while_64_workers_come_and_go() -> None:
    rng, adapters, causes = Random(0), FakeAdapters(), Counter[str]()
    names = [f"worker-{number}" for number in range(NUM_MEMBERS)]
    fleet = Fleet(adapters, FakeRecorder(), names)
    places: list[SleepingPlace] = []

    async def run() -> list[RolloutGroup]:
        members = [asyncio.create_task(live(fleet, name, rng, places, causes)) for name in names]
        job = GroupJob(source=SOURCE, group_size=GROUP_SIZE, params=PARAMS)
        groups = await asyncio.gather(*(run_group(fleet, make_task(), index, job) for index in range(NUM_GROUPS)))
        for member in members:
            member.cancel()
            with suppress(asyncio.CancelledError):
                await member
        return groups

    groups = run_jumping(run())

    assert min(causes[cause] for cause in ("died", "stopped", "cut off", "broke")) >= 5
    ended = [one for group in groups for one in (*group.rollouts, *group.faulty)]
    assert len({one.rollout_id for one in ended}) == len(ended)
    for group in groups:
        attempts = Counter(one.member_index for one in (*group.rollouts, *group.faulty))
        assert sorted(attempts) == list(range(GROUP_SIZE))
        scored = Counter(one.member_index for one in group.rollouts)
        assert all(scored[index] == 1 or attempts[index] == MAX_ATTEMPTS for index in attempts)
        faults = [one for one in group.faulty if one.stop_reason is not StopReason.DEVICE_ERROR]
        assert faults == []
    begun = Counter(rollout_id for place in places for rollout_id in place.begun)
    assert max(begun.values()) == 1  # no rollout ran twice
    assert sum(len(group.rollouts) for group in groups) >= 0.9 * NUM_GROUPS * GROUP_SIZE
    assert fleet.workers == {}
    assert adapters.used == frozenset()  # nothing stays pinned
