"""Groups: several rollouts of one task instance under one policy, all groups of a step side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4

from cua_rl.events import Source
from cua_rl.rollout.run import RolloutPlan
from cua_rl.tasks.task import Task
from cua_rl.types import AdapterRef, Rollout, RolloutGroup, SamplingParams

MAX_ATTEMPTS = 3  # a fault is retried on a fresh device; three faults in a row are no accident


class Runner(Protocol):
    """Runs one rollout to its end."""

    async def run(self, plan: RolloutPlan) -> Rollout: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How every group of a step or an evaluation is run."""

    source: Source
    group_size: int
    params: SamplingParams
    adapter: AdapterRef | None = None
    min_group_size: int = 1
    """With fewer members that no fault ended, a group is recorded but not trained on."""


OnGroup = Callable[[RolloutGroup], Awaitable[None]]


async def run_groups(runner: Runner, tasks: Sequence[Task], plan: GroupPlan, on_group: OnGroup) -> list[RolloutGroup]:
    """Run one group per task, all at once; the device pool sets how many rollouts really run side by side.

    `on_group` is called with each group as soon as its last member has ended.
    """

    async def run(task: Task, index: int) -> RolloutGroup:
        group = await run_group(runner, task, index, plan)
        await on_group(group)
        return group

    async with asyncio.TaskGroup() as running:
        groups = [running.create_task(run(task, index), name=f"group-{index}") for index, task in enumerate(tasks)]
    return [group.result() for group in groups]


async def run_group(runner: Runner, task: Task, index: int, plan: GroupPlan) -> RolloutGroup:
    """Run all members of one group side by side; `index` is the group's place in its step or evaluation."""
    group_id = uuid4().hex
    async with asyncio.TaskGroup() as running:
        members = [
            running.create_task(
                _run_member(
                    runner,
                    RolloutPlan(
                        source=plan.source,
                        group_id=group_id,
                        group_index=index,
                        member_index=member,
                        task=task,
                        params=plan.params.seeded(index, member),
                        adapter=plan.adapter,
                    ),
                ),
                name=f"rollout-{index}-{member}",
            )
            for member in range(plan.group_size)
        ]
    rollouts = [rollout for member in members for rollout in member.result()]
    survivors = tuple(rollout for rollout in rollouts if rollout.reward is not None)
    return RolloutGroup(
        group_id=group_id,
        index=index,
        task_id=task.task_id,
        seed=task.seed,
        rollouts=survivors,
        faulty=tuple(rollout for rollout in rollouts if rollout.reward is None),
        is_incomplete=len(survivors) < plan.min_group_size,
        category=task.category,
    )


async def _run_member(runner: Runner, plan: RolloutPlan) -> list[Rollout]:
    """All attempts at one place in the group: faulty ones, then the one that counts (if any)."""
    attempts: list[Rollout] = []
    while len(attempts) < MAX_ATTEMPTS:
        params = plan.params.seeded(len(attempts)) if attempts else plan.params
        attempts.append(await runner.run(replace(plan, params=params)))
        if attempts[-1].reward is not None:
            break
    return attempts
