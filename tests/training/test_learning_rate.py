from math import cos, pi

import pytest

from cua_rl.training.config import LearningConfig, RateSchedule


def rates(schedule: RateSchedule, warmup_steps: int = 0, max_steps: int = 5) -> list[float]:
    config = LearningConfig(learning_rate=2.0, learning_rate_schedule=schedule, warmup_steps=warmup_steps)
    return [config.learning_rate_at(step, max_steps) for step in range(1, max_steps + 1)]


def test_a_line_falls_by_equal_steps_and_is_at_zero_after_the_last_one() -> None:
    assert rates("linear") == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


def test_a_cosine_is_slow_at_both_ends() -> None:
    # 1 + cos of 0, 45, 90 and 135 degrees
    assert rates("cosine", max_steps=4) == pytest.approx([2.0, 1.7071068, 1.0, 0.2928932])


def test_the_warm_up_rises_in_a_line_and_then_the_schedule_begins() -> None:
    # a third, two thirds, then the full rate
    assert rates("constant", warmup_steps=2) == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0, 2.0])
    assert rates("linear", warmup_steps=2) == pytest.approx([2 / 3, 4 / 3, 2.0, 4 / 3, 2 / 3])


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("max_steps", [8, 20, 1000])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_first_and_last_steps_are_those_of_the_closed_form(
    schedule: RateSchedule, warmup_steps: int, max_steps: int
) -> None:
    found, num_decaying = rates(schedule, warmup_steps, max_steps), max_steps - warmup_steps
    last = {
        "constant": 2.0,
        "linear": 2.0 / num_decaying,
        "cosine": 1.0 + cos(pi * (1 - 1 / num_decaying)),
    }

    assert found[0] == pytest.approx(2.0 / (warmup_steps + 1))
    assert found[warmup_steps] == 2.0
    assert found[-1] == pytest.approx(last[schedule])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_step_has_the_full_rate(schedule: RateSchedule) -> None:
    assert rates(schedule, max_steps=1) == [2.0]
