"""Statistics: confidence intervals of success rates, pass@k, and paired tests of two models."""

from collections.abc import Sequence
from fractions import Fraction
from math import comb, fsum, lcm, sqrt
from random import Random

Z_95 = 1.96
SIGN_DRAWS = 10_000
MOST_COUNTED = 5_000_000  # additions of an exact test, at most: a second or two
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


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

    Attempts at the same task are correlated, so they count less than attempts at different tasks. This is Wilson's
    interval at the number of independent trials that has the variance of the task means (L. Kish, 1965), with Student's
    quantile, because that variance is estimated from the tasks. With one attempt per task it is Wilson's interval.
    """
    attempts = [task for task in attempts if task]
    num_successes, num_trials = sum(map(sum, attempts)), sum(map(len, attempts))
    if not num_trials:
        return 0.0, 1.0
    rate, num_tasks = num_successes / num_trials, len(attempts)
    if num_tasks in (1, num_trials):
        return wilson_interval(rate * num_tasks, num_tasks)
    num_independent = float(num_tasks)  # at least; and where the variance cannot be estimated
    if rate not in (0.0, 1.0):
        deviations = [(sum(task) - rate * len(task)) / num_trials for task in attempts]
        variance = num_tasks / (num_tasks - 1) * fsum(deviation**2 for deviation in deviations)
        num_independent = float(num_trials)
        if variance:
            num_independent = min(num_independent, max(float(num_tasks), rate * (1 - rate) / variance))
    return wilson_interval(rate * num_independent, num_independent, student_quantile(num_tasks - 1))


def pass_at_k(num_attempts: int, num_successes: int, k: int) -> float:
    """Unbiased estimate from n >= k attempts that at least one of k attempts succeeds (Chen et al., 2021).

    One success in four attempts, k = 2: 1 - C(3, 2) / C(4, 2) = 0.5.
    """
    if not 1 <= k <= num_attempts:
        raise ValueError(f"expected k from 1 to the number of attempts {num_attempts}, got {k}")
    return 1.0 - comb(num_attempts - num_successes, k) / comb(num_attempts, k)


def sign_flip_test(differences: Sequence[Fraction], seed: int = 0) -> float:
    """Two-sided p value of the hypothesis that two models are equally good, from their differences per task.

    Under this hypothesis each difference in success rate could equally have the other sign: p is the share of all sign
    assignments whose sum is at least as far from 0 as the observed one (R. A. Fisher, 1935). With one attempt per task
    this is McNemar's exact test: 5 against 0 -> 2 * 0.5^5 = 0.0625. The smallest p that n tasks can give is 2 / 2^n.

    All assignments are counted, unless the sums take too many values (many different numbers of attempts per task);
    then 10,000 are drawn with a fixed seed.
    """
    scale = lcm(*(difference.denominator for difference in differences))
    signed = [int(difference * scale) for difference in differences if difference]
    sizes, observed = [abs(value) for value in signed], abs(sum(signed))
    if len(sizes) * sum(sizes) > MOST_COUNTED:
        random = Random(seed)
        draws = (abs(sum(random.choice((-size, size)) for size in sizes)) for _ in range(SIGN_DRAWS))
        return (sum(drawn >= observed for drawn in draws) + 1) / (SIGN_DRAWS + 1)
    # chances[i]: probability that the sizes with a plus add up to i; the signed sum is then 2 i - sum(sizes)
    chances = [1.0]
    for size in sizes:
        without, having = [*chances, *[0.0] * size], [*[0.0] * size, *chances]
        chances = [(one + other) / 2 for one, other in zip(without, having, strict=True)]
    return min(1.0, fsum(chance for i, chance in enumerate(chances) if abs(2 * i - sum(sizes)) >= observed))


def paired_interval(differences: Sequence[Fraction], num_attempts: int) -> tuple[float, float]:
    """95 % interval of the mean difference over tasks with `num_attempts` attempts of each model.

    Student's interval over tasks plus two pseudo-tasks, in which one and then the other model is better by
    1 / sqrt(attempts), as by chance. With one attempt per task it is the interval of D. G. Bonett and R. M. Price
    (2012) with Student's quantile. The pseudo-tasks give it a width when all differences are equal, and the nominal
    coverage for few tasks.
    """
    if len(differences) < 2:
        return -1.0, 1.0
    num, chance = len(differences) + 2, 1 / sqrt(num_attempts)
    mean = float(sum(differences)) / num
    variance = (fsum(float(value) ** 2 for value in differences) + 2 * chance**2) / num - mean**2
    spread = student_quantile(len(differences) - 1) * sqrt(variance / num)
    return max(-1.0, mean - spread), min(1.0, mean + spread)


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution: 12.71 with 1 degree of freedom, 1.96 with many."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = Z_95  # Fisher's expansion, accurate to 1e-4 from here on
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
