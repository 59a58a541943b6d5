import pytest

from cua_rl.evaluation.evaluate import wilson_interval


def test_wilson_interval_of_eight_in_ten() -> None:
    # centre (0.8 + 0.19208) / 1.38416 = 0.7167, half width 1.96 * sqrt(0.016 + 0.009604) / 1.38416 = 0.2266
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_interval_stays_inside_zero_and_one() -> None:
    assert wilson_interval(0, 5)[0] == 0.0
    assert wilson_interval(5, 5)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
