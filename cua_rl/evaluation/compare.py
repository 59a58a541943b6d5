"""Compares models on the same task instances: figures of each, and paired tests against the first."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from cua_rl.evaluation.attempts import Attempt, TaskOutcomes, outcomes_by_position
from cua_rl.evaluation.evaluate import summarise
from cua_rl.evaluation.statistics import paired_interval, sign_flip_test
from cua_rl.reporting.comparison import Comparison, PairRow


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
