import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.evaluation.statistics import (
    bootstrap_difference,
    mcnemar_exact,
    pass_at_k,
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
    assert success_interval([[True] * 4] * 8 + [[False] * 4] * 2) == pytest.approx(wilson_interval(8, 10))


def test_attempts_that_differ_as_by_chance_count_each() -> None:
    mixed = [[True, False], [False, True]] * 20
    assert success_interval(mixed) == pytest.approx(wilson_interval(40, 80))


def test_intervals_of_extremes_count_tasks_and_not_attempts() -> None:
    assert success_interval([[True] * 8] * 5) == wilson_interval(5, 5)
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


def test_mcnemar_by_hand() -> None:
    assert mcnemar_exact(5, 0) == pytest.approx(0.0625)
    # 2 * (1 + 10 + 45) / 1024
    assert mcnemar_exact(2, 8) == pytest.approx(0.109375)
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(0, 0) == 1.0


def test_a_clear_difference_is_far_from_zero_and_none_is_not() -> None:
    low, high, p_value = bootstrap_difference([1.0] * 30 + [0.0] * 10)
    assert 0.5 < low < 0.75 < high < 0.95
    assert p_value == pytest.approx(2 / 5001)
    assert bootstrap_difference([0.0] * 10) == (0.0, 0.0, 1.0)
    assert bootstrap_difference([]) == (-1.0, 1.0, 1.0)


def test_the_bootstrap_gives_the_same_figures_again() -> None:
    differences = [0.5, -0.25, 0.0, 0.75, 0.25]
    assert bootstrap_difference(differences) == bootstrap_difference(differences)
