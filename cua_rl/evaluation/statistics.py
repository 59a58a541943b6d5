"""Statistics: success rates over tasks with their 95 % intervals, pass@k, and paired tests of two models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import compress
from math import comb, exp, fsum, lcm, lgamma, log, log1p, sqrt
from random import Random

Z_95 = 1.96
SIGN_DRAWS = 10_000
MOST_COUNTED = 10**10  # bits that an exact test adds, at most: less than a second
_IS_ODD = bytes(value & 1 for value in range(256))
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def rate_interval(rate: float, num_trials: float) -> tuple[float, float]:
    """95 % interval of a rate from independent trials: 0.8 of 10 -> (0.44, 0.96); no trials -> (0, 1).

    Wilson's score interval (1927) with a continuity correction of half a trial (R. G. Newcombe, 1998), which fades if
    there are more than two successes and failures. Without it, Wilson's interval covers only 83 % near 0 and 1.
    """
    if num_trials <= 0:
        return 0.0, 1.0
    z2 = Z_95**2 / num_trials
    num_rare = num_trials * min(rate, 1 - rate)
    shift = 0.5 / num_trials * min(1.0, 2 / num_rare if num_rare > 0 else 1.0)
    low, high = max(0.0, rate - shift), min(1.0, rate + shift)
    low_end = (low + z2 / 2 - sqrt(z2 * low * (1 - low) + z2**2 / 4)) / (1 + z2)
    high_end = (high + z2 / 2 + sqrt(z2 * high * (1 - high) + z2**2 / 4)) / (1 + z2)
    return max(0.0, min(low_end, rate)), min(1.0, max(high_end, rate))  # rounding may leave out a rate of 0 or 1


def independent_trials(rate: float, variance: float, fewest: float, most: float, degrees: int) -> float:
    """The number of independent trials that tell as much about a rate as clusters of trials (L. Kish, 1965).

    `variance` is the estimate of the rate's variance, `fewest` and `most` are the numbers if trials of a cluster always
    agree and if they are independent. Student's quantile allows for the error of the estimate. Its degrees of freedom
    are those of the clusters or of the rarer outcome: three successes cannot show how alike trials are.
    """
    if degrees < 1:
        return fewest
    spread, scaled = rate * (1 - rate), variance * (student_quantile(degrees) / Z_95) ** 2
    return most if scaled * most <= spread else max(fewest, spread / scaled)


def _pseudo_task(rate: float) -> float:
    """Squared distance from the rate of one more task, half of which is always and half never solved."""
    # A few tasks that are never solved are easily missed, however often the others are attempted; without it, attempts
    # at ten tasks that are mostly solved alike would count as independent (`paired_interval` has the same).
    return (rate**2 + (1 - rate) ** 2) / 2


@dataclass(frozen=True, slots=True)
class TaskSums:
    """Sums over tasks from which their success follows; a database can form them as well, in this order."""

    num_tasks: float
    """Tasks with a judged attempt."""
    rates: float
    """Of the tasks; then their squares, and 1 / attempts."""
    squares: float
    inverses: float
    num_successes: float
    num_attempts: float
    num_lost: float = 0
    """Tasks without a judged attempt."""

    @property
    def rate(self) -> float | None:
        """The mean of the tasks' success rates, so a task does not count less if it lost attempts to faults."""
        return self.rates / self.num_tasks if self.num_tasks else None

    @property
    def num_independent(self) -> float:
        """The number of independent trials that tell as much about the success rate."""
        return self._completed(0)[1] if self.num_tasks else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval; lost tasks count as failed at its lower end, and as solved at its upper end.

        Tasks are a sample of the tasks that there could be. Attempts at the same task are alike, so they tell less than
        attempts at different tasks: how much less is estimated from the tasks' rates (`independent_trials`).
        """
        if not self.num_tasks:
            return 0.0, 1.0
        return rate_interval(*self._completed(0))[0], rate_interval(*self._completed(1))[1]

    def _completed(self, outcome: int) -> tuple[float, float]:
        """The rate and the independent trials if every lost task had this outcome."""
        num, added = self.num_tasks + self.num_lost, outcome * self.num_lost
        rate = (self.rates + added) / num
        variance = (max(0.0, self.squares + added - num * rate**2) + _pseudo_task(rate)) / num**2
        successes = self.num_successes + added
        degrees = int(min(num, successes, self.num_attempts + self.num_lost - successes)) - 1
        return rate, independent_trials(rate, variance, num, num**2 / (self.inverses + self.num_lost), degrees)


NO_TASKS = TaskSums(0, 0, 0, 0, 0, 0)


def sum_tasks(counts: Iterable[tuple[int, int]]) -> TaskSums:
    """The sums over tasks with so many successes in so many attempts."""
    lost = (0, 0, 0, 0, 0, 0, 1)
    tasks = [(1, won / done, (won / done) ** 2, 1 / done, won, done, 0) if done else lost for won, done in counts]
    return TaskSums(*map(fsum, zip(*tasks, strict=True))) if tasks else NO_TASKS


def independent_sums(num_successes: float, num_attempts: float) -> TaskSums:
    """Attempts that are independent, as those at one task instance are if its own success rate is asked for."""
    return TaskSums(num_attempts, num_successes, num_successes, num_attempts, num_successes, num_attempts)


def mean_over_tasks(values: Iterable[Sequence[float]]) -> float:
    """The mean over tasks of the mean of each one's values, so that all tasks count alike; 0 without values."""
    means = [fsum(task) / len(task) for task in values if task]
    return fsum(means) / len(means) if means else 0.0


def ratio_interval(clusters: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """95 % interval of the rate of all trials, from the successes and trials of each cluster."""
    counts = [(successes, trials) for successes, trials in clusters if trials]
    num_successes, num_trials = sum(successes for successes, _ in counts), sum(trials for _, trials in counts)
    if not num_trials:
        return 0.0, 1.0
    rate = num_successes / num_trials
    squares = fsum((successes - rate * trials) ** 2 for successes, trials in counts)
    variance = squares / num_trials**2 + _pseudo_task(rate) / len(counts) ** 2
    fewest = num_trials**2 / sum(trials**2 for _, trials in counts)
    degrees = min(len(counts), num_successes, num_trials - num_successes) - 1
    return rate_interval(rate, independent_trials(rate, variance, fewest, num_trials, degrees))


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
    num, total = len(sizes), sum(sizes)
    if observed == 0:
        return 1.0
    if num * num * total > MOST_COUNTED:
        random = Random(seed)
        with_plus = (sum(compress(sizes, random.randbytes(num).translate(_IS_ODD))) for _ in range(SIGN_DRAWS))
        return (sum(abs(2 * plus - total) >= observed for plus in with_plus) + 1) / (SIGN_DRAWS + 1)
    # one integer with fields of `width` bits: field i counts the assignments in which the sizes with a plus add up to
    # i, so that the signed sum is 2 i - total; as 2**width is 1 modulo 2**width - 1, the remainder adds all fields
    width, counts = num + 1, 1
    for size in sizes:
        counts += counts << width * size
    return 2 * ((counts >> width * ((total + observed) // 2)) % (2**width - 1)) / 2**num


def regression_p_value(num_worse: int, num_better: int) -> float:
    """One-sided p value of McNemar's exact test (1947) that a model is no worse: 7 against 1 -> 9 / 2^8 = 0.035.

    Tasks on which both agree say nothing; of the others, half would be worse by chance. The mid-p variant finds more
    (M. W. Fagerland, S. Lydersen and P. Laake, 2013), but only the exact test promises how often it is wrong.
    """
    num = num_worse + num_better
    return sum(comb(num, count) for count in range(num_worse, num + 1)) / 2**num


@cache
def regression_power(num_tasks: int, worse: float, better: float, false_alarms: float) -> float:
    """Probability that `regression_p_value` is at most `false_alarms`, if each task gets worse or better so often.

    The conditional power, averaged over how many of the tasks differ (M. A. Schork and G. W. Williams, 1980). With
    worse = better, it is the probability of a false alarm.
    """
    power, chances = 0.0, _binomial(num_tasks, worse + better)
    for num in (num for num, chance in enumerate(chances) if chance > 1e-18):  # others add nothing, and take long
        # the fewest of `num` that raise an alarm; ways to get `count` of them, and at least as many
        count, ways, tail, most = num, 1, 1, int(Fraction(false_alarms) * 2**num)
        while tail <= most and count:
            ways, count = ways * count // (num - count + 1), count - 1
            tail += ways
        power += chances[num] * fsum(_binomial(num, worse / (worse + better))[count + 1 :])
    return power


def _binomial(num: int, rate: float) -> list[float]:
    """The probability of each count of successes in so many trials."""
    if rate in (0.0, 1.0):
        return [float(count == num * rate) for count in range(num + 1)]
    choices = (lgamma(num + 1) - lgamma(count + 1) - lgamma(num - count + 1) for count in range(num + 1))
    return [exp(ways + count * log(rate) + (num - count) * log1p(-rate)) for count, ways in enumerate(choices)]


def paired_interval(differences: Sequence[Fraction]) -> tuple[float, float]:
    """95 % interval of the mean difference over tasks, however often each was attempted.

    Student's interval over tasks and one pseudo-task, half of which is won by one model and half by the other (as D. G.
    Bonett and R. M. Price, 2012, add two). It gives the interval a width when all differences are equal: a few tasks
    at which a model always fails and the other never does are easily missed, however many attempts there are.
    """
    if len(differences) < 2:
        return -1.0, 1.0
    num = len(differences) + 1
    mean = float(sum(differences)) / num
    variance = (fsum(float(value) ** 2 for value in differences) + 1) / num - mean**2
    spread = student_quantile(len(differences) - 1) * sqrt(variance / num)
    return max(-1.0, mean - spread), min(1.0, mean + spread)


def difference_interval(
    first: tuple[float, tuple[float, float]], second: tuple[float, tuple[float, float]]
) -> tuple[float, float]:
    """95 % interval of second - first, from the rates of two unpaired samples and their intervals.

    R. G. Newcombe (1998), Statistics in Medicine 17, 873-890: the distances of the rates to their ends are squared and
    added (his method 10).
    """
    (one, (one_low, one_high)), (two, (two_low, two_high)) = first, second
    low, high = sqrt((two - two_low) ** 2 + (one_high - one) ** 2), sqrt((two_high - two) ** 2 + (one - one_low) ** 2)
    return max(-1.0, two - one - low), min(1.0, two - one + high)


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution: 12.71 with 1 degree of freedom, 1.96 with many."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = Z_95  # Fisher's expansion, accurate to 1e-4 from here on
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
