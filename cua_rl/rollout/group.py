"""Groups: several rollouts of one task instance under one policy, all groups of a step side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, TypeVar
from uuid import uuid4

from cua_rl.events import RolloutSource
from cua_rl.rollout.branches import BEGINNING, BranchingSettings, Fork, find_forks
from cua_rl.rollout.run import RolloutJob
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import AdapterRef, Rollout, RolloutGroup, SamplingParams

_Ended = TypeVar("_Ended")

MAX_ATTEMPTS = 3  # a fault is retried on a fresh device; three in a row are not a coincidence


class Runner(Protocol):
    """Runs one rollout to its end."""

    async def run(self, job: RolloutJob) -> Rollout: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """Settings shared by all groups of a step or an evaluation."""

    source: RolloutSource
    group_size: int
    params: SamplingParams
    adapter: AdapterRef | None = None
    min_group_size: int = 1
    """With fewer members without a fault, a group is recorded but not trained on."""
    branching: BranchingSettings = field(default_factory=BranchingSettings)
    moving_top: float = 0.0  # share of screenshots, from the top, that siblings need not see again


RunGroup = Callable[[Task, int], Awaitable[RolloutGroup]]
EndGroup = Callable[[RolloutGroup, Task | None], Awaitable[_Ended]]


async def collect_groups(
    tasks: Sequence[Task], run: RunGroup, end: EndGroup[_Ended], *, num_groups: int | None = None
) -> list[_Ended]:
    """Run one group per task, all at once, and return what `end` makes of each, in the order of `tasks`.

    The device pool limits how many rollouts actually run at the same time. With `num_groups`, only so many groups
    start; further tasks replace groups that turn out constant, one each (DAPO's dynamic sampling, arXiv:2503.14476).
    Every group that was started is waited for and returned, so that quick rollouts are not favoured.

    `end` gets each group as soon as its last member has ended, and the task that replaces it, if any.
    """
    waiting = enumerate(tasks)
    ended: dict[int, _Ended] = {}

    async def fill_place(index: int, task: Task) -> None:
        following: tuple[int, Task] | None = (index, task)
        while following is not None:
            index, task = following
            group = await run(task, index)
            following = next(waiting, None) if group.is_constant else None
            ended[index] = await end(group, following[1] if following else None)

    async with asyncio.TaskGroup() as running:
        for index, task in list(islice(waiting, num_groups)):
            running.create_task(fill_place(index, task), name=f"group-{index}")
    return [ended[index] for index in sorted(ended)]


async def run_group(
    runner: Runner, task: Task, index: int, job: GroupJob, *, group_id: str = "", members: Sequence[int] = ()
) -> RolloutGroup:
    """Run all members of one group, or some, side by side; `index` is its place in its step or evaluation.

    With branches, siblings begin when all of those that begin with the task have ended.
    """
    group_id = group_id or uuid4().hex

    async def run_members(wanted: Mapping[int, Fork]) -> list[list[Rollout]]:
        async with asyncio.TaskGroup() as running:
            running_members = [
                running.create_task(
                    run_member(
                        runner,
                        RolloutJob(
                            source=job.source,
                            group_id=group_id,
                            group_index=index,
                            member_index=member,
                            task=task,
                            params=job.params.seeded(index, member),
                            adapter=job.adapter,
                            fork=fork,
                            keeps_moments=member in parents,
                        ),
                    ),
                    name=f"rollout-{index}-{member}",
                )
                for member, fork in wanted.items()
            ]
        return [member.result() for member in running_members]

    num_parents = job.branching.num_parents(job.group_size)
    num_first = job.branching.num_begun(job.group_size)
    parents = range(num_first - num_parents, num_first)
    attempts = await run_members(dict.fromkeys(members or range(num_first), BEGINNING))
    if parents:
        seed = job.params.seeded(index, "forks").seed
        begun = [tried[-1] for tried in attempts]
        forks = await asyncio.to_thread(find_forks, begun, job.branching, num_parents, seed, job.moving_top)
        attempts += await run_members(forks)
    rollouts = [replace(rollout, moments=()) for tried in attempts for rollout in tried]
    survivors = tuple(rollout for rollout in rollouts if rollout.reward is not None)
    return RolloutGroup(
        group_id=group_id,
        index=index,
        task_id=task.task_id,
        seed=task.seed,
        rollouts=survivors,
        faulty=tuple(rollout for rollout in rollouts if rollout.reward is None),
        is_incomplete=len(survivors) < min(job.min_group_size, len(attempts)),
        category=task.category,
    )


async def run_member(runner: Runner, job: RolloutJob) -> list[Rollout]:
    """All attempts for a member: faulty ones, repeated on fresh devices with other seeds, then the one that counts."""
    attempts: list[Rollout] = []
    while len(attempts) < MAX_ATTEMPTS:
        params = job.params.seeded(len(attempts)) if attempts else job.params
        rollout_id = uuid4().hex if attempts else job.rollout_id
        failed_in = frozenset(one.worker for one in attempts)
        attempt = replace(job, params=params, rollout_id=rollout_id, failed_in=failed_in)
        attempts.append(await runner.run(attempt))
        if attempts[-1].reward is not None:
            break
    return attempts
