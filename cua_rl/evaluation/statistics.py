"""Figures with their uncertainty: intervals of rates, pass@k, and tests of two models on the same tasks."""

from collections.abc import Sequence
from math import comb, fsum, sqrt
from random import Random

Z_95 = 1.96
BOOTSTRAP_SAMPLES = 5000


def wilson_interval(num_successes: float, num_trials: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a success rate (E. B. Wilson, 1927): 8 of 10 -> (0.49, 0.94); no trials -> (0, 1)."""
    if num_trials == 0:
        return 0.0, 1.0
    rate, z2 = num_successes / num_trials, z * z
    centre = rate + z2 / (2 * num_trials)
    spread = z * sqrt(rate * (1 - rate) / num_trials + z2 / (4 * num_trials**2))
    scale = 1 + z2 / num_trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def success_interval(attempts: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % interval of the success rate over tasks with several attempts each.

    Attempts at one task are alike, so they count for less than as many tasks: Wilson's interval is taken at the
    number of independent trials with the same variance as the means of the tasks (L. Kish, 1965). With one attempt a
    task it is Wilson's own.
    """
    attempts = [task for task in attempts if task]
    num_successes, num_trials = sum(map(sum, attempts)), sum(map(len, attempts))
    if not num_trials:
        return 0.0, 1.0
    rate, num_independent = num_successes / num_trials, _independent_trials(attempts)
    return wilson_interval(rate * num_independent, num_independent)


def _independent_trials(attempts: Sequence[Sequence[bool]]) -> float:
    """Between the number of tasks and the number of attempts; the number of tasks where it cannot be estimated."""
    num_tasks, num_trials = len(attempts), sum(map(len, attempts))
    rate = sum(map(sum, attempts)) / num_trials
    if num_tasks in (1, num_trials) or rate in (0.0, 1.0):
        return float(num_tasks)
    deviations = [(sum(task) - rate * len(task)) / num_trials for task in attempts]
    variance = num_tasks / (num_tasks - 1) * fsum(deviation**2 for deviation in deviations)
    return min(float(num_trials), max(float(num_tasks), rate * (1 - rate) / variance)) if variance else num_trials


def pass_at_k(num_attempts: int, num_successes: int, k: int) -> float:
    """Chance that at least one of k attempts succeeds, without bias from n >= k attempts (Chen et al., 2021).

    One success in four attempts, k = 2: 1 - C(3, 2) / C(4, 2) = 0.5.
    """
    if not 1 <= k <= num_attempts:
        raise ValueError(f"expected k from 1 to the number of attempts {num_attempts}, got {k}")
    return 1.0 - comb(num_attempts - num_successes, k) / comb(num_attempts, k)


def mcnemar_exact(num_only_first: int, num_only_second: int) -> float:
    """Two-sided p value that two models solve equally many of the same tasks (McNemar's test, exact).

    Counts the tasks that only one of them solved; given their number, each is a fair coin if the models are equal:
    5 against 0 -> 2 * 0.5^5 = 0.0625.
    """
    num_pairs = num_only_first + num_only_second
    tail = sum(comb(num_pairs, wins) for wins in range(min(num_only_first, num_only_second) + 1))
    return min(1.0, 2 * tail / 2**num_pairs)


def bootstrap_difference(differences: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """95 % interval of the mean difference per task, and a two-sided p value that it is 0.

    Tasks are drawn anew with replacement, 5000 times, with a fixed seed: (low, high, p). The smallest p is 2 / 5001.
    """
    if not differences:
        return -1.0, 1.0, 1.0
    random, num_tasks = Random(seed), len(differences)
    means = sorted(fsum(random.choices(differences, k=num_tasks)) / num_tasks for _ in range(BOOTSTRAP_SAMPLES))
    num_low, num_high = sum(mean <= 0 for mean in means), sum(mean >= 0 for mean in means)
    p_value = min(1.0, 2 * (min(num_low, num_high) + 1) / (BOOTSTRAP_SAMPLES + 1))
    return means[int(0.025 * BOOTSTRAP_SAMPLES)], means[int(0.975 * BOOTSTRAP_SAMPLES)], p_value
