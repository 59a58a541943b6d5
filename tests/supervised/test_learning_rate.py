import pytest

from cua_rl.supervised.learning_rate import RateSchedule, learning_rate_at


def rates(schedule: RateSchedule, warmup_steps: int = 0, max_steps: int = 5) -> list[float]:
    return [
        learning_rate_at(step, highest=1.0, schedule=schedule, warmup_steps=warmup_steps, max_steps=max_steps)
        for step in range(1, max_steps + 1)
    ]


def test_a_line_falls_to_a_tenth_at_the_last_step() -> None:
    # from 1 to 0.1 in four equal steps of 0.225
    assert rates("linear") == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])


def test_a_cosine_is_slow_at_both_ends() -> None:
    # the middle is halfway: 0.55; a quarter of the way (1 + cos 45 degrees) / 2 = 0.854 of the drop is left
    assert rates("cosine") == pytest.approx([1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1])


def test_the_warm_up_rises_in_a_line_and_then_the_schedule_begins() -> None:
    # a third, two thirds, then the full rate
    assert rates("constant", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0])
    assert rates("linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.55, 0.1])


def test_a_single_step_has_the_full_rate() -> None:
    assert rates("linear", max_steps=1) == [1.0]
