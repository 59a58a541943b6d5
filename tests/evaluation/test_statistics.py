import operator
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import prod, sqrt
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.evaluation.statistics import (
    difference_interval,
    mean_over_tasks,
    paired_interval,
    pass_at_k,
    rate_interval,
    ratio_interval,
    regression_p_value,
    regression_power,
    sign_flip_test,
    student_quantile,
    sum_tasks,
)


def success_interval(attempts: Sequence[Sequence[bool]]) -> tuple[float, float]:
    return sum_tasks((sum(task), len(task)) for task in attempts).interval


def test_the_interval_of_eight_in_ten_by_hand() -> None:
    # two failures: the full correction, 0.8 -+ 0.05; with z2 = 3.8416 / 10 = 0.38416
    # (0.75 + 0.19208 - sqrt(0.38416 * 0.1875 + 0.03690)) / 1.38416, (0.85 + 0.19208 + sqrt(...0.1275...)) / 1.38416
    assert rate_interval(0.8, 10) == pytest.approx((0.4422, 0.9646), abs=1e-4)


def test_the_correction_fades_with_more_successes_and_failures() -> None:
    # 32 of each: 2 / 32 of half a trial, 0.0005; Wilson's interval (statsmodels 0.14) is 0.3810 to 0.6190
    assert rate_interval(0.5, 64) == pytest.approx((0.3810 - 0.0005, 0.6190 + 0.0005), abs=1e-4)


def test_an_interval_stays_inside_zero_and_one() -> None:
    assert rate_interval(0.0, 5)[0] == 0.0
    assert rate_interval(1.0, 5)[1] == 1.0
    assert rate_interval(0.0, 0) == (0.0, 1.0)
    for num in range(1, 3000):  # also the rate at an end, which rounding leaves out of some, such as 144 of 144
        assert rate_interval(0.0, num)[0] == 0.0
        assert rate_interval(1.0, num)[1] == 1.0


def test_one_attempt_a_task_is_one_independent_trial() -> None:
    assert success_interval([[True]] * 8 + [[False]] * 2) == pytest.approx(rate_interval(0.8, 10))


def test_attempts_that_always_agree_count_as_one() -> None:
    assert success_interval([[True] * 4] * 8 + [[False] * 4] * 2) == pytest.approx(rate_interval(0.8, 10))


def test_attempts_that_differ_as_by_chance_count_each() -> None:
    mixed = [[True, False], [False, True]] * 20
    assert success_interval(mixed) == pytest.approx(rate_interval(0.5, 80))


def test_attempts_count_for_less_the_more_their_tasks_differ() -> None:
    # rates 1/4 and 3/4 four times each: sum of squares 8 * (1/4)^2 = 0.5, of the pseudo-task (1/4 + 1/4) / 2 = 0.25, so
    # the variance of the mean is 0.75 / 8^2; seven degrees of freedom: 0.25 / (0.75 / 64) * (1.96 / 2.3646)^2 = 14.657
    tasks = sum_tasks([(1, 4), (3, 4)] * 4)
    assert tasks.num_independent == pytest.approx(14.657, abs=1e-3)
    assert tasks.interval == pytest.approx(rate_interval(0.5, 14.657), abs=1e-4)


def test_a_few_successes_do_not_show_how_alike_attempts_are() -> None:
    assert sum_tasks([(0, 16)] * 9 + [(1, 16)]).num_independent == 10


def test_tasks_count_alike_however_many_of_their_attempts_faults_took() -> None:
    halved = sum_tasks([(16, 16)] * 5 + [(0, 2)] * 5)
    assert (halved.rate, halved.num_successes, halved.num_attempts) == (0.5, 80, 90)
    # 10^2 / (5 / 16 + 5 / 2) at most, if attempts were independent
    assert sum_tasks([(8, 16)] * 5 + [(1, 2)] * 5).num_independent == pytest.approx(100 / 2.8125)


def test_a_lost_task_counts_as_failed_below_and_as_solved_above() -> None:
    assert success_interval([[True], [False], []]) == (rate_interval(1 / 3, 3)[0], rate_interval(2 / 3, 3)[1])
    assert success_interval([[], []]) == success_interval([]) == (0.0, 1.0)


def test_a_ratio_of_all_trials_weighs_clusters_by_their_trials() -> None:
    # clusters that always agree: 12^2 / (3 * 4^2) = 3 independent trials; of 1 + 1 + 10, 144 / 102
    assert ratio_interval([(4, 4), (4, 4), (0, 4)]) == pytest.approx(rate_interval(2 / 3, 3))
    assert ratio_interval([(0, 1), (0, 1), (0, 10), (0, 0)]) == pytest.approx(rate_interval(0.0, 144 / 102))
    assert ratio_interval([(0, 0)]) == (0.0, 1.0)


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=12))
def test_the_interval_holds_the_rate(attempts: list[list[bool]]) -> None:
    low, high = success_interval(attempts)

    assert 0.0 <= low <= high <= 1.0
    if any(attempts):
        assert low - 1e-12 <= mean_over_tasks(attempts) <= high + 1e-12


def test_pass_at_k_by_hand() -> None:
    # 1 - C(3, 2) / C(4, 2) = 1 - 3/6; every choice of 2 from 3 successes and 1 failure holds a success
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)


def test_pass_at_more_than_was_tried_is_refused() -> None:
    with pytest.raises(ValueError, match="expected k from 1"):
        pass_at_k(4, 1, 5)


def ones(num_plus: int, num_minus: int, num_zero: int = 0) -> list[Fraction]:
    return [Fraction(1)] * num_plus + [Fraction(-1)] * num_minus + [Fraction(0)] * num_zero


def test_with_one_attempt_a_task_the_sign_flip_test_is_mcnemars() -> None:
    assert sign_flip_test(ones(5, 0, 7)) == 0.0625
    # 2 * (1 + 10 + 45) / 1024
    assert sign_flip_test(ones(2, 8)) == 0.109375
    assert sign_flip_test(ones(3, 3)) == 1.0
    assert sign_flip_test(ones(0, 0, 9)) == sign_flip_test([]) == 1.0


def test_the_sign_flip_test_by_hand() -> None:
    # 1/2 + 1/4 + 1/4 = 1; of the 8 sums +-1/2 +-1/4 +-1/4 only 1 and -1 are as far from 0
    assert sign_flip_test([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]) == 2 / 8
    # 1/2 - 1/4 + 1/4 = 1/2: 1, 1/2, 1/2 and their opposites
    assert sign_flip_test([Fraction(1, 2), Fraction(-1, 4), Fraction(1, 4)]) == 6 / 8


def test_one_difference_alone_proves_nothing() -> None:
    assert sign_flip_test([Fraction(1, 4), *[Fraction(0)] * 29]) == 1.0


@given(st.lists(st.fractions(-1, 1, max_denominator=4), min_size=1, max_size=8))
def test_the_sign_flip_test_counts_all_assignments(differences: list[Fraction]) -> None:
    observed = abs(sum(differences))
    sums = [sum(map(operator.mul, signs, differences)) for signs in product((1, -1), repeat=len(differences))]

    assert sign_flip_test(differences) == pytest.approx(sum(abs(one) >= observed for one in sums) / len(sums))


def test_where_sums_take_too_many_values_signs_are_drawn_with_a_fixed_seed() -> None:
    rng = Random(1)
    uneven = [Fraction(rng.randint(-3, 4), rng.choice((5, 7, 8, 9, 11, 13))) for _ in range(60)]
    spread = sqrt(sum(float(one) ** 2 for one in uneven))

    drawn = sign_flip_test(uneven)

    assert drawn == sign_flip_test(uneven)
    assert drawn == pytest.approx(2 * NormalDist().cdf(-abs(float(sum(uneven))) / spread), abs=0.02)


def test_the_interval_of_paired_attempts_by_hand() -> None:
    # 12 tasks, 6 better and 1 worse, and half of one of each: mean 5/13, variance 8/13 - (5/13)^2, Student 2.2010
    mean, spread = 5 / 13, 2.2010 * sqrt((8 / 13 - (5 / 13) ** 2) / 13)

    assert paired_interval(ones(6, 1, 5)) == pytest.approx((mean - spread, mean + spread), abs=1e-4)


@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=12))
def test_no_paired_interval_is_without_width_or_without_the_difference(differences: list[Fraction]) -> None:
    low, high = paired_interval(differences)

    assert -1.0 <= low < high <= 1.0
    if differences:
        assert low <= float(sum(differences)) / len(differences) <= high
    same = paired_interval([Fraction(1, 2)] * 30)
    assert same[1] - same[0] > 0.05


def _wilson(won: int, num: int) -> tuple[float, tuple[float, float]]:
    """A rate and its interval without a correction, as the published figures have it."""
    rate, z = won / num, NormalDist().inv_cdf(0.975)
    centre, spread = rate + z**2 / (2 * num), z * sqrt(rate * (1 - rate) / num + z**2 / (4 * num**2))
    return rate, ((centre - spread) / (1 + z**2 / num), (centre + spread) / (1 + z**2 / num))


@pytest.mark.parametrize(
    ("two", "one", "published"),
    [((56, 70), (48, 80), (0.0524, 0.3339)), ((9, 10), (3, 10), (0.1705, 0.8090)), ((10, 10), (0, 10), (0.6075, 1.0))],
)
def test_the_difference_of_two_rates_has_newcombes_interval(
    two: tuple[int, int], one: tuple[int, int], published: tuple[float, float]
) -> None:
    # R. G. Newcombe (1998), table II, method 10: cases a, b and h
    assert difference_interval(_wilson(*one), _wilson(*two)) == pytest.approx(published, abs=6e-5)


def test_students_quantiles() -> None:
    for degrees, quantile in ((1, 12.7062), (4, 2.7764), (9, 2.2622), (10, 2.2281), (29, 2.0452), (1000, 1.9623)):
        assert student_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


@pytest.mark.parametrize("num_tasks", [3, 5, 10, 30])
@pytest.mark.parametrize("num_attempts", [1, 4])
def test_equal_models_are_told_apart_in_at_most_a_twentieth_of_evaluations(num_tasks: int, num_attempts: int) -> None:
    random = Random(f"{num_tasks}/{num_attempts}")
    num_told_apart = 0
    for _ in range(600):
        differences: list[Fraction] = []
        for _ in range(num_tasks):  # of any difficulty: their success rate is uniform
            rate = random.random()
            first, second = (sum(random.random() < rate for _ in range(num_attempts)) for _ in range(2))
            differences.append(Fraction(second - first, num_attempts))
        num_told_apart += sign_flip_test(differences) <= 0.05

    assert num_told_apart / 600 <= 0.05 + 3 * sqrt(0.05 * 0.95 / 600)


def test_one_sided_p_values_are_those_of_the_binomial_distribution() -> None:
    # 7 worse, 1 better: (C(8, 7) + C(8, 8)) / 2^8; the two-sided 0.070 of Fagerland, Lydersen and Laake (2013), table 1
    assert regression_p_value(7, 1) == 9 / 256
    assert sign_flip_test([Fraction(-1)] * 7 + [Fraction(1)]) == pytest.approx(2 * 9 / 256)
    assert regression_p_value(0, 0) == 1.0
    assert regression_p_value(0, 5) == 1.0


def test_the_power_is_that_of_all_outcomes_of_a_few_tasks() -> None:
    worse, better, num_tasks = 0.4, 0.05, 7
    chances = {-1: worse, 1: better, 0: 1 - worse - better}

    expected = 0.0
    for outcome in product(chances, repeat=num_tasks):
        if regression_p_value(outcome.count(-1), outcome.count(1)) <= 0.05:
            expected += prod(chances[each] for each in outcome)

    assert regression_power(num_tasks, worse, better, 0.05) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("worse", "better"), [(0.15, 0.05), (0.1, 0.0), (0.3, 0.2)])
def test_the_power_for_many_tasks_is_near_that_of_the_normal_approximation(worse: float, better: float) -> None:
    # R. J. Connor (1987): n = (z_alpha sqrt(d) + z_power sqrt(d - fall^2))^2 / fall^2 with d tasks that differ
    differ, fall, normal = worse + better, worse - better, NormalDist()

    for power in (0.8, 0.9):
        spread = normal.inv_cdf(0.95) * sqrt(differ) + normal.inv_cdf(power) * sqrt(differ - fall**2)
        num_tasks = round((spread / fall) ** 2)
        # the exact test is the more careful one, and its power is a saw's edge
        assert power - 0.1 < regression_power(num_tasks, worse, better, 0.05) < power + 0.03


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.3, 0.5])
def test_without_a_fall_an_alarm_is_no_more_likely_than_promised(rate: float) -> None:
    for num_tasks in (5, 64, 144):
        assert regression_power(num_tasks, rate, rate, 0.05) <= 0.05
