"""Searches for what would have worked: a checkpoint goes on from turns of failed rollouts, and validators decide."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from uuid import uuid4

from sqlalchemy import select

from cua_rl.database.models import Group, RolloutRow, Step
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.asking import Recorded, load_recorded
from cua_rl.run.takeover import Demonstrations, PreparedTakeover
from cua_rl.run_folder.recorded_run import RecordedTraining
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import AdapterRef, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a failed rollout: from which turn siblings succeeded, counted from 1; None if from none."""

    recorded: Recorded
    turn: int | None
    num_successes: int
    num_rollouts: int
    faults: tuple[str, ...]


def fork_places(num_turns: int, most: int) -> list[int]:
    """The indices of up to `most` turns from which to go on, evenly spread, the last turn first and never the first:
    of 6 turns, three are 5, 4, 2.

    The later the turn, the more of what went wrong is before it, which is what there is to recover from.
    """
    last = num_turns - 1
    number = min(most, last)
    return [last - place * last // number for place in range(number)]


async def load_failed(run: RecordedTraining, number: int) -> list[Recorded]:
    """Up to so many failed rollouts of training steps, one of each group, those of the latest steps first; all with the
    latest one's settings. Raises `ConfigError` if there is none with screenshots and two turns.
    """
    query = (
        select(RolloutRow.rollout_id, RolloutRow.group_pk)
        .join(Group, RolloutRow.group_pk == Group.id)
        .join(Step, Group.step_id == Step.id)
        .where(
            Step.training_id == run.key,
            RolloutRow.status == "completed",
            RolloutRow.success.is_(False),
            RolloutRow.pruned_at.is_(None),
            RolloutRow.num_turns > 1,
        )
        .order_by(Step.step.desc(), Group.group_index, RolloutRow.position.desc())
    )
    of_groups = {group_pk: rollout_id for rollout_id, group_pk in await run.session.execute(query)}
    failed = [await load_recorded(run, rollout_id) for rollout_id in list(of_groups.values())[:number]]
    if not failed:
        raise ConfigError(
            f"log_path: expected failed rollouts of two turns or more that were not pruned, got none in "
            f"{str(run.folder)!r}; choose another run"
        )
    return [one for one in failed if one.settings == failed[0].settings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Failed rollouts of a run with their tasks, and what goes on from them, and where that is recorded."""

    failed: Sequence[tuple[Recorded, Task]]
    num_siblings: int
    num_turns: int
    """Turns of a rollout from which is gone on, at most."""
    seed: int
    prepared: PreparedTakeover
    demonstrations: Demonstrations
    adapter: AdapterRef | None
    _numbers: "count[int]" = field(default_factory=count)

    async def run(self) -> list[Found]:
        """Search from all rollouts at a time; raises `ConfigError` for what stops a run."""
        async with asyncio.TaskGroup() as searching:
            found = [searching.create_task(self._recover(recorded, task)) for recorded, task in self.failed]
        return [one.result() for one in found]

    async def _recover(self, recorded: Recorded, task: Task) -> Found:
        """Go on from one turn after the other, until siblings succeed."""
        places = fork_places(min(len(recorded.rollout.turns), task.max_turns), self.num_turns)
        groups: list[RolloutGroup] = []
        num_successes = 0
        for place in places:
            otherwise = None if place == places[-1] else task
            groups.append(await self.demonstrations.add(self._jobs(recorded, task, place), otherwise))
            num_successes = sum(rollout.success for rollout in groups[-1].rollouts)
            if num_successes:
                break
        return Found(
            recorded=recorded,
            turn=places[len(groups) - 1] + 1 if num_successes else None,
            num_successes=num_successes,
            num_rollouts=sum(len(group.rollouts) for group in groups),
            faults=tuple(str(rollout.error) for group in groups for rollout in group.faulty),
        )

    def _jobs(self, recorded: Recorded, task: Task, place: int) -> list[RolloutJob]:
        job = replace(self.prepared, recorded=recorded, task=task, place=place).job(
            self.demonstrations.step, self.adapter
        )
        job = replace(job, group_index=next(self._numbers), params=replace(job.params, seed=self.seed))
        origin = recorded.rollout.rollout_id, place
        return [
            replace(job, rollout_id=uuid4().hex, member_index=member, params=job.params.seeded(*origin, member))
            for member in range(self.num_siblings)
        ]
