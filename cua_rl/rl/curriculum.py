"""Curriculum: which tasks a step runs, which successes are replayed, and the state of both that a resumed run needs.

Everything here is a function of recorded outcomes, group by group in the order of the step, never of which rollout
happened to end first: a resumed run continues with the tasks that the uninterrupted run would have seen.

Replay. Where a whole group fails, a stored success of an earlier step joins it, which is biased in two ways. An older
policy sampled it: its tokens enter the loss with the per-token ratio of training over recorded sampling probability,
which leaves the distribution of screens uncorrected, and "ppo" rather than "importance_sampling" limits large ratios.
And it was selected because it succeeded, on another instance of the task, so the group's mean reward no longer
estimates what the policy earns.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, cast

from cua_rl.reporting.json_lines import append_record, read_records, write_records
from cua_rl.tasks.task import Task, Template
from cua_rl.types.group_members import without_siblings
from cua_rl.types.rollout import Rollout, RolloutGroup

FADE = 0.8  # a running success rate looks back about 1 / (1 - FADE) = 5 groups
FLOOR = 0.1  # a task that is always or never solved keeps this share of the largest weight


def curriculum_metrics(groups: Sequence[RolloutGroup], num_wanted: int) -> dict[str, float]:
    """Metrics of refilling: groups sampled, constant groups dropped, and how full the batch is."""
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
    """The outcome of one group, without replayed rollouts and siblings."""

    task_id: str
    num_successes: int
    num_rollouts: int
    """Members with a reward."""
    success_id: str | None = None
    """The rollout that the group leaves for replay; None if no member succeeded."""


def build_outcome(group: RolloutGroup) -> GroupOutcome:
    success, begun = first_success(group), without_siblings(group).rollouts
    return GroupOutcome(
        task_id=group.task_id,
        num_successes=sum(rollout.success for rollout in begun),
        num_rollouts=len(begun),
        success_id=None if success is None else success.rollout_id,
    )


def first_success(group: RolloutGroup) -> Rollout | None:
    """The success that a group leaves for replay."""
    return next((rollout for rollout in group.rollouts if rollout.success), None)


@dataclass
class SuccessRates:
    """Running success rate per task: counts that fade by `FADE` with each group of the task, plus one success and one
    failure as a prior. 8 of 8 once: (8 + 1) / (8 + 2) = 0.9.
    """

    _counts: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def observe(self, outcomes: Iterable[GroupOutcome]) -> None:
        """Update the rates with the outcomes of groups, in their order."""
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

    def uniform_success(self, outcomes: Iterable[GroupOutcome]) -> dict[str, float]:
        """The success rate if all tasks were drawn equally often: each group counts by 1 / its task's draw weight.

        `outcomes` are not observed yet, so that the rates are those of the draw, except that an
        asynchronous run drew some of the groups steps before.
        """
        judged = [one for one in outcomes if one.num_rollouts]
        shares = [1 / draw_weight(self.rate(one.task_id)) for one in judged]
        successes = (share * one.num_successes / one.num_rollouts for share, one in zip(shares, judged, strict=True))
        return {"reward/success_rate_uniform": sum(successes) / sum(shares)} if judged else {}

    def metrics(self) -> dict[str, float]:
        """The running rate of every task that has been tried."""
        return {f"curriculum/success_rate/{task_id}": self.rate(task_id) for task_id in sorted(self._counts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRateStream:
    """A `TaskStream` that prefers tasks solved half of the time; a function of number, `seed` and `rates`."""

    templates: Sequence[Template]
    seed: int
    instance_seeds: range
    rates: SuccessRates

    def batch(self, number: int, num_tasks: int) -> list[Task]:
        """The tasks of a batch: each template as often as its share of the weights, rounded up or down."""
        random = Random(f"success-rate-{self.seed}-{number}")
        weights = [draw_weight(self.rates.rate(template.task_id)) for template in self.templates]
        drawn = systematic_draw(weights, num_tasks, random.random())
        random.shuffle(drawn)
        return [self.templates[index].make_task(random.choice(self.instance_seeds)) for index in drawn]


def draw_weight(success_rate: float) -> float:
    """The sampling weight of a task: the variance of its success, scaled to 1 at rate 0.5 and to `FLOOR` at 0 and 1."""
    return FLOOR + (1 - FLOOR) * 4 * success_rate * (1 - success_rate)


def systematic_draw(weights: Sequence[float], num: int, offset: float) -> list[int]:
    """Systematic sampling: `num` indices, each about in proportion to its weight.

    The weights are laid end to end, and `num` equally spaced points, shifted by `offset` in [0, 1) of their distance,
    select the indices. Weights 3 and 1, 4 points: [0, 0, 0, 1].
    """
    ends = list(accumulate(weights))
    drawn: list[int] = []
    index = 0
    for point in range(num):
        position = (point + offset) / num * ends[-1]
        while index < len(weights) - 1 and position >= ends[index]:
            index += 1
        drawn.append(index)
    return drawn


@dataclass
class ReplayBuffer:
    """The newest successes of every task, at most `capacity_per_task`; with 0, nothing is stored or replayed.

    A group leaves at most one success, so that one easy instance does not crowd out the others. Screenshots stay in
    memory with their rollouts.
    """

    capacity_per_task: int = 0
    _stored: dict[str, tuple[Rollout, ...]] = field(default_factory=dict[str, tuple[Rollout, ...]])

    @property
    def num_stored(self) -> int:
        return sum(map(len, self._stored.values()))

    def join(self, group: RolloutGroup) -> RolloutGroup:
        """The group with a stored success of its task, if no member succeeded; the group's index decides which one."""
        stored = self._stored.get(group.task_id, ())
        if not stored or not group.rollouts or any(rollout.success for rollout in group.rollouts):
            return group
        return replace(group, replayed=(stored[-1 - group.index % len(stored)],))

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Store successes, oldest first."""
        if self.capacity_per_task:
            for rollout in rollouts:
                kept = (*self._stored.get(rollout.task_id, ()), rollout)
                self._stored[rollout.task_id] = kept[-self.capacity_per_task :]


def replay_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    """The number of replayed rollouts, and their age: optimizer steps from the sampling policy to `policy_version`."""
    replayed = [rollout for group in groups for rollout in group.replayed]
    ages = [policy_version - turn.model.policy_version for rollout in replayed for turn in rollout.turns]
    metrics = {"replay/num_rollouts": float(len(replayed))}
    return metrics | ({"replay/age/mean": sum(ages) / len(ages), "replay/age/max": float(max(ages))} if ages else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What steps pass on: rates, and successes to replay; `outcomes_path` has a JSON line per step to restore both."""

    rates: SuccessRates | None = None
    """None if tasks are not drawn by success rate."""
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)
    outcomes_path: Path | None = None

    async def remember(self, num_steps: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take in the groups of a step, after which `num_steps` are complete; durable when this returns."""
        outcomes = [build_outcome(group) for group in groups]
        uniform = self.rates.uniform_success(outcomes) if self.rates is not None else {}
        if self.rates is not None:
            self.rates.observe(outcomes)
        self.replay.add(success for group in groups if (success := first_success(group)) is not None)
        if self.outcomes_path is not None:
            record = {"step": num_steps, "groups": [asdict(outcome) for outcome in outcomes]}
            await asyncio.to_thread(append_record, self.outcomes_path, record)
        rates = self.rates.metrics() if self.rates is not None else {}
        stored = {"replay/num_stored": float(self.replay.num_stored)} if self.replay.capacity_per_task else {}
        return uniform | rates | stored


def load_outcomes(path: Path, num_steps: int) -> list[GroupOutcome]:
    """The outcomes of the first `num_steps` steps, in order; deletes those of later steps, which will run again."""
    records = read_records(path)
    kept = [record for record in records if cast("int", record["step"]) <= num_steps]
    if len(kept) < len(records):
        write_records(path, kept)
    groups = [group for record in kept for group in cast("list[Mapping[str, Any]]", record["groups"])]
    return [GroupOutcome(**group) for group in groups]


def newest_success_ids(outcomes: Iterable[GroupOutcome], capacity_per_task: int) -> list[str]:
    """Ids of the rollouts that a `ReplayBuffer` holds after these outcomes, in the order in which it stored them."""
    by_task: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.success_id is not None:
            by_task.setdefault(outcome.task_id, []).append(outcome.success_id)
    return [rollout_id for ids in by_task.values() for rollout_id in ids[max(0, len(ids) - capacity_per_task) :]]
