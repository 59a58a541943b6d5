"""Curriculum: which tasks a step runs, and what happens to groups that teach nothing.

Everything here is a function of recorded outcomes, group by group in the order of the step, never of which rollout
happened to end first: a resumed run goes on with the tasks that the first one would have seen.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from random import Random
from typing import Protocol

from cua_rl.tasks.task import Task
from cua_rl.types import RolloutGroup

FADE = 0.8  # a running success rate looks back about 1 / (1 - FADE) = 5 groups
FLOOR = 0.1  # a task that is always solved, or never, still has this share of the largest weight

RunGroup = Callable[[Task, int], Awaitable[RolloutGroup]]
OnGroupEnd = Callable[[RolloutGroup, Task | None], Awaitable[None]]


async def collect_groups(
    tasks: Sequence[Task], num_groups: int, run: RunGroup, on_end: OnGroupEnd
) -> list[RolloutGroup]:
    """Run groups until `num_groups` of them teach, or `tasks` are used up; all that were run, in the order of `tasks`.

    There are `num_groups` places. A place runs the next task, and one more each time its group turns out constant
    (DAPO's dynamic sampling, arXiv:2503.14476). Every group that was begun is waited for and belongs to the step, so
    that quick rollouts are not favoured. `on_end` gets each group, and the task that runs next because this one
    teaches nothing.
    """
    waiting = enumerate(tasks)
    ended: list[RolloutGroup] = []

    async def fill_place(index: int, task: Task) -> None:
        following: tuple[int, Task] | None = (index, task)
        while following is not None:
            index, task = following
            group = await run(task, index)
            ended.append(group)
            following = next(waiting, None) if group.is_constant else None
            await on_end(group, following[1] if following else None)

    async with asyncio.TaskGroup() as running:
        for index, task in list(islice(waiting, num_groups)):
            running.create_task(fill_place(index, task), name=f"group-{index}")
    return sorted(ended, key=lambda group: group.index)


def curriculum_metrics(groups: Sequence[RolloutGroup], num_wanted: int) -> dict[str, float]:
    """What refilling did: groups sampled, groups dropped because they teach nothing, and how full the batch is."""
    num_dropped = sum(group.is_constant for group in groups)
    num_trained = len(groups) - num_dropped
    return {
        "curriculum/num_sampled_groups": float(len(groups)),
        "curriculum/num_dropped_groups": float(num_dropped),
        "curriculum/effective_group_frac": num_trained / len(groups) if groups else 0.0,
        "curriculum/batch_fill_frac": num_trained / num_wanted,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What one group says about its task."""

    task_id: str
    num_successes: int
    num_rollouts: int
    """Members with a reward."""
    success_id: str | None = None
    """The rollout that the group leaves for replay; None if no member succeeded."""


@dataclass
class SuccessRates:
    """Running success rate per task: counts that fade by `FADE` per group of the task, with one success and one
    failure to begin with. 8 of 8 once: (8 + 1) / (8 + 2) = 0.9.
    """

    _counts: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def observe(self, outcomes: Iterable[GroupOutcome]) -> None:
        """Take the outcomes of groups, in their order."""
        for outcome in outcomes:
            successes, failures = self._counts.get(outcome.task_id, (0.0, 0.0))
            self._counts[outcome.task_id] = (
                FADE * successes + outcome.num_successes,
                FADE * failures + outcome.num_rollouts - outcome.num_successes,
            )

    def rate(self, task_id: str) -> float:
        """Between 0 and 1, both exclusive; 0.5 for a task that has not been tried."""
        successes, failures = self._counts.get(task_id, (0.0, 0.0))
        return (successes + 1) / (successes + failures + 2)

    def metrics(self) -> dict[str, float]:
        """The running rate of every task that has been tried."""
        return {f"curriculum/success_rate/{task_id}": self.rate(task_id) for task_id in sorted(self._counts)}


def draw_weight(success_rate: float) -> float:
    """How often a task is drawn: the variance of its success, 1 at rate 0.5, and `FLOOR` at rates 0 and 1."""
    return FLOOR + (1 - FLOOR) * 4 * success_rate * (1 - success_rate)


class Template(Protocol):
    """A task that can be made for every seed."""

    @property
    def task_id(self) -> str: ...

    def make_task(self, seed: int) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRateStream:
    """Draws tasks that are solved about half of the time more often than those that always or never are.

    A `TaskStream` whose batches are a function of their number, seed and `rates`.
    """

    templates: Sequence[Template]
    seed: int
    instance_seeds: range
    rates: SuccessRates

    def batch(self, number: int, num_tasks: int) -> list[Task]:
        """The tasks of a batch. Every template comes as often as its share of the weights says, rounded up or down."""
        random = Random(f"success-rate-{self.seed}-{number}")
        weights = [draw_weight(self.rates.rate(template.task_id)) for template in self.templates]
        drawn = systematic_draw(weights, num_tasks, random.random())
        random.shuffle(drawn)
        return [self.templates[index].make_task(random.choice(self.instance_seeds)) for index in drawn]


def systematic_draw(weights: Sequence[float], num: int, offset: float) -> list[int]:
    """`num` indices, each about in proportion to its weight: a comb of `num` teeth, moved by `offset` in [0, 1), over
    the weights laid end to end. Weights 3 and 1, 4 teeth: [0, 0, 0, 1].
    """
    ends = list(accumulate(weights))
    drawn: list[int] = []
    index = 0
    for tooth in range(num):
        position = (tooth + offset) / num * ends[-1]
        while index < len(weights) - 1 and position >= ends[index]:
            index += 1
        drawn.append(index)
    return drawn
