import operator
from fractions import Fraction
from itertools import product
from math import sqrt
from random import Random
from statistics import NormalDist
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.evaluation.statistics import (
    paired_interval,
    pass_at_k,
    sign_flip_test,
    student_quantile,
    success_interval,
    wilson_interval,
)


def test_wilson_interval_of_eight_in_ten() -> None:
    # centre (0.8 + 0.19208) / 1.38416 = 0.7167, half width 1.96 * sqrt(0.016 + 0.009604) / 1.38416 = 0.2266
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_interval_stays_inside_zero_and_one() -> None:
    assert wilson_interval(0, 5)[0] == 0.0
    assert wilson_interval(5, 5)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_one_attempt_a_task_gives_wilsons_interval() -> None:
    assert success_interval([[True]] * 8 + [[False]] * 2) == wilson_interval(8, 10)


def test_attempts_that_always_agree_count_as_one() -> None:
    # variance of the rate: 10/9 * (8 * 0.02^2 + 2 * 0.08^2) = 0.0178; 0.16 / 0.0178 = 9, but there are 10 tasks
    # and Student's quantile with 9 degrees of freedom
    assert success_interval([[True] * 4] * 8 + [[False] * 4] * 2) == pytest.approx(wilson_interval(8, 10, 2.2622))


def test_attempts_that_differ_as_by_chance_count_each() -> None:
    mixed = [[True, False], [False, True]] * 20
    assert success_interval(mixed) == pytest.approx(wilson_interval(40, 80, student_quantile(39)))


def test_intervals_of_extremes_count_tasks_and_not_attempts() -> None:
    assert success_interval([[True] * 8] * 5) == wilson_interval(5, 5, 2.7764)
    assert success_interval([]) == (0.0, 1.0)
    assert success_interval([[], [True]]) == wilson_interval(1, 1)


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=12))
def test_the_interval_holds_the_rate(attempts: list[list[bool]]) -> None:
    flat = [success for task in attempts for success in task]
    low, high = success_interval(attempts)

    assert 0.0 <= low <= high <= 1.0
    if flat:
        assert low - 1e-12 <= sum(flat) / len(flat) <= high + 1e-12


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


def test_the_interval_of_paired_single_attempts_by_hand() -> None:
    # 12 tasks, 6 better and 1 worse, and one of each added: mean 5/14, variance 9/14 - (5/14)^2, Student 2.2010
    mean, spread = 5 / 14, 2.2010 * sqrt((9 / 14 - (5 / 14) ** 2) / 14)

    assert paired_interval(ones(6, 1, 5), 1) == pytest.approx((mean - spread, mean + spread), abs=1e-4)


@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=12), st.sampled_from([1, 2, 4]))
def test_no_paired_interval_is_without_width_or_without_the_difference(
    differences: list[Fraction], num_attempts: int
) -> None:
    low, high = paired_interval(differences, num_attempts)

    assert -1.0 <= low < high <= 1.0
    if differences:
        assert low <= float(sum(differences)) / len(differences) <= high
    same = paired_interval([Fraction(1, 2)] * 30, num_attempts)
    assert same[1] - same[0] > 0.05


def test_students_quantiles() -> None:
    for degrees, quantile in ((1, 12.7062), (4, 2.7764), (9, 2.2622), (10, 2.2281), (29, 2.0452), (1000, 1.9623)):
        assert student_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


class TwoModels(NamedTuple):
    """What two models that are equally good at every task make of it."""

    differences: list[Fraction]
    attempts: list[list[bool]]
    """Of the first."""


def draw_models(random: Random, num_tasks: int, num_attempts: int) -> TwoModels:
    """Tasks are of any difficulty: their success rate is uniform, its mean 0.5."""
    differences: list[Fraction] = []
    attempts: list[list[bool]] = []
    for _ in range(num_tasks):
        rate = random.random()
        first, second = ([random.random() < rate for _ in range(num_attempts)] for _ in range(2))
        differences.append(Fraction(sum(second) - sum(first), num_attempts))
        attempts.append(first)
    return TwoModels(differences, attempts)


@pytest.mark.parametrize("num_tasks", [3, 5, 10, 30])
@pytest.mark.parametrize("num_attempts", [1, 4])
def test_equal_models_are_told_apart_in_at_most_a_twentieth_of_evaluations(num_tasks: int, num_attempts: int) -> None:
    random = Random(f"{num_tasks}/{num_attempts}")
    drawn = [draw_models(random, num_tasks, num_attempts) for _ in range(600)]
    margin = 3 * sqrt(0.05 * 0.95 / len(drawn))

    is_told_apart = [sign_flip_test(models.differences) <= 0.05 for models in drawn]
    paired = [paired_interval(models.differences, num_attempts) for models in drawn]
    single = [success_interval(models.attempts) for models in drawn]

    assert sum(is_told_apart) / len(drawn) <= 0.05 + margin
    assert sum(low <= 0 <= high for low, high in paired) / len(drawn) >= 0.95 - margin
    assert sum(low <= 0.5 <= high for low, high in single) / len(drawn) >= 0.95 - margin
