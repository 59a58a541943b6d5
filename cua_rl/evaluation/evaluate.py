"""Evaluates a policy version on held-out task instances, and compares models; rates have confidence intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import fsum

from cua_rl.evaluation.attempts import Attempt, TaskOutcomes, attempts_of, outcomes_by_position, task_outcomes
from cua_rl.evaluation.statistics import mean_over_tasks, paired_interval, pass_at_k, sign_flip_test, sum_tasks
from cua_rl.events import EvaluationEnded, GroupEnded, Recorder, RolloutSource, SourceStarted
from cua_rl.reporting.comparison import Comparison, EvalResult, PairRow
from cua_rl.rollout.group import GroupJob, Runner, collect_groups, run_group
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import AdapterRef, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Attempts the same held-out tasks `num_attempts` times in every evaluation, with the adapter pinned."""

    tasks: Sequence[Task]
    runner: Runner
    params: SamplingParams
    recorder: Recorder
    num_attempts: int = 1

    async def run(self, source: RolloutSource, adapter: AdapterRef) -> EvalResult:
        """Attempt every task under `adapter` and record the outcome."""
        await self.recorder.record(
            SourceStarted(
                source=source,
                tasks=tuple(self.tasks),
                group_size=self.num_attempts,
                policy_version=adapter.policy_version,
            )
        )

        async def record_end(group: RolloutGroup, _: Task | None) -> RolloutGroup:
            await self.recorder.record(GroupEnded(source=source, group=group, advantages=None))
            return group

        job = GroupJob(source=source, group_size=self.num_attempts, params=self.params, adapter=adapter)
        groups = await collect_groups(self.tasks, partial(run_group, self.runner, job=job), record_end)
        attempts = [attempts_of(group, task, "policy") for group, task in zip(groups, self.tasks, strict=True)]
        result = summarise([*map(task_outcomes, attempts)])
        await self.recorder.record(EvaluationEnded(source=source, metrics=result.metrics("held_out")))
        return result


def summarise(outcomes: Sequence[TaskOutcomes], name: str = "policy") -> EvalResult:
    """Success over all tasks, of each the mean of its attempts that ended without a fault.

    Whether the policy would have failed or succeeded where a fault struck is unknown, so `worst` and `best` bound its
    influence. They count first tries: if faults depend on the outcome, a retry does not replace the first try.
    """
    bounds = [task.bounds for task in outcomes if task.successes or task.num_given_up]
    sums = sum_tasks((sum(task.successes), len(task.successes)) for task in outcomes)
    low, high = sums.interval
    most = max((len(task.successes) + task.num_given_up for task in outcomes if task.successes), default=0)
    counts = sorted({2**power for power in range(most.bit_length())} | ({most} if most else set()))
    num_short = {k: sum(len(task.successes) < k for task in outcomes) for k in counts}
    return EvalResult(
        success_rate=sums.rate or 0.0,
        low=low,
        high=high,
        num_rollouts=int(sums.num_attempts),
        num_faults=sum(task.num_faults for task in outcomes),
        num_turns_mean=mean_over_tasks(task.num_turns for task in outcomes),
        success_rate_by_category=_rates(outcomes, lambda task: task.category),
        success_rate_by_difficulty=_rates(outcomes, lambda task: task.difficulty),
        pass_at={
            k: fsum(pass_at_k(len(task.successes), sum(task.successes), k) for task in outcomes) / len(outcomes)
            for k in counts
            if not num_short[k]
        },
        num_short_tasks={k: num for k, num in num_short.items() if num},
        num_tasks=int(sums.num_tasks),
        num_successes=int(sums.num_successes),
        reward_mean=mean_over_tasks(task.rewards for task in outcomes),
        worst=fsum(worst for worst, _ in bounds) / max(1, len(bounds)),
        best=fsum(best for _, best in bounds) / max(1, len(bounds)),
        name=name,
    )


def _rates(outcomes: Sequence[TaskOutcomes], name_of: Callable[[TaskOutcomes], str]) -> dict[str, float]:
    """Success rate per name, sorted by name."""
    by_name: dict[str, list[tuple[bool, ...]]] = {}
    for task in sorted(outcomes, key=name_of):
        by_name.setdefault(name_of(task), []).append(task.successes)
    return {name: mean_over_tasks(tasks) for name, tasks in by_name.items() if any(tasks)}


def compare_models(attempts: Sequence[Attempt], names: Sequence[str]) -> Comparison:
    """The figures of the models in the order of `names`, and the comparison of each later one with the first."""
    outcomes = {name: outcomes_by_position(attempts, name) for name in names}
    rows = [summarise(list(tasks.values()), name) for name, tasks in outcomes.items()]
    pairs = [compare_pair(names[0], outcomes[names[0]], other, outcomes[other]) for other in names[1:]]
    return Comparison(models=tuple(rows), pairs=tuple(pairs))


def compare_pair(
    first: str, first_tasks: Mapping[int, TaskOutcomes], second: str, second_tasks: Mapping[int, TaskOutcomes]
) -> PairRow:
    """A permutation test of two models over tasks, which is McNemar's test if every task was attempted once."""
    pairs = [
        (first_tasks[position].successes, outcomes.successes)
        for position, outcomes in second_tasks.items()
        if outcomes.successes and position in first_tasks and first_tasks[position].successes
    ]
    differences = [Fraction(sum(theirs), len(theirs)) - Fraction(sum(ours), len(ours)) for ours, theirs in pairs]
    num_worse, num_better = sum(value < 0 for value in differences), sum(value > 0 for value in differences)
    low, high = paired_interval(differences)
    is_single = all(len(ours) == len(theirs) == 1 for ours, theirs in pairs)
    return PairRow(
        first=first,
        second=second,
        num_tasks=len(pairs),
        difference=float(sum(differences)) / max(1, len(differences)),
        low=low,
        high=high,
        p_value=sign_flip_test(differences),
        test="McNemar's test, exact" if is_single else "sign-flip permutation test over tasks",
        num_only_first=num_worse,
        num_only_second=num_better,
    )
