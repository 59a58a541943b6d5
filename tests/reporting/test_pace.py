"""Step time and time left, for timelines worked out by hand."""

from math import inf

from cua_rl.reporting.pace import Attempt, TimeLeft, evaluations_due


def left(attempt: Attempt, *, num_steps: int, owed: list[int], now: float) -> TimeLeft | None:
    return attempt.time_left(num_steps=num_steps, owed=owed, total_steps=8, now=now)


def test_synchronous_evaluations_are_no_step_time_and_those_owed_are_time_left() -> None:
    # two steps of 10 s, an evaluation of 60 s, two more steps
    attempt = Attempt(began_at=0, steps=[(0, 10), (10, 20), (80, 90), (90, 100)], evaluations=[(20, 80)])

    assert attempt.step_time_s == 10
    # four steps of 10 s, the evaluations after steps 6 and 8 of 60 s each
    assert left(attempt, num_steps=4, owed=[6, 8], now=100) == TimeLeft(seconds=160, is_lower_bound=False)
    # 4 s into the fifth step
    assert left(attempt, num_steps=4, owed=[6, 8], now=104) == TimeLeft(seconds=156, is_lower_bound=False)


def test_a_running_evaluation_counts_by_what_is_left_of_it() -> None:
    steps, first = [(60.0, 70.0), (70.0, 80.0)], (0.0, 60.0)
    attempt = Attempt(began_at=60, steps=steps, evaluations=[first, (80, inf)])

    # 47 s into an evaluation of about 60 s, then six steps of 10 s and the last evaluation
    assert left(attempt, num_steps=6, owed=[2, 8], now=127) == TimeLeft(seconds=13 + 60 + 60, is_lower_bound=False)
    finishing = Attempt(began_at=60, steps=steps, evaluations=[first, (80, inf)])
    assert left(finishing, num_steps=0, owed=[8], now=90) == TimeLeft(seconds=50, is_lower_bound=False)


def test_overlapping_asynchronous_steps_count_once() -> None:
    # each takes 30 s from its first rollout to its end, and one ends every 10 s
    steps = [(0.0, 30.0), (10.0, 40.0), (20.0, 50.0), (30.0, 60.0)]
    attempt = Attempt(began_at=0, steps=[*steps, (40, inf)], evaluations=[(-60, 0), (42, 58)])

    assert attempt.step_time_s == 15  # 60 s for four
    # four steps of 15 s; the evaluation after step 6 runs beside them, the last one takes its 16 s
    assert left(attempt, num_steps=4, owed=[6, 8], now=60) == TimeLeft(seconds=60 + 16, is_lower_bound=False)


def test_the_pace_is_of_the_last_ten_steps() -> None:
    slow, fast = [(100.0 * n, 100.0 * n + 100) for n in range(5)], [(500.0 + 10 * n, 510.0 + 10 * n) for n in range(10)]

    assert Attempt(began_at=0, steps=slow + fast).step_time_s == 10


def test_downtime_before_a_resume_is_no_step_time() -> None:
    # steps 1 to 3 ended an hour ago in another attempt; this one began at 3,600 s and has ended one step
    attempt = Attempt(began_at=3600, steps=[(3600, 3617)])

    assert attempt.step_time_s == 17
    assert left(attempt, num_steps=5, owed=[], now=3617) == TimeLeft(seconds=85, is_lower_bound=False)


def test_the_first_step_has_no_estimate_and_unmeasured_evaluations_make_it_a_lower_bound() -> None:
    assert Attempt(began_at=0, steps=[(0, inf)]).step_time_s is None
    assert left(Attempt(began_at=0, steps=[(0, inf)]), num_steps=8, owed=[8], now=5) is None
    first = Attempt(began_at=0, steps=[(0, 10)])
    assert left(first, num_steps=7, owed=[8], now=10) == TimeLeft(seconds=70, is_lower_bound=True)


def test_evaluations_are_due_after_every_so_many_steps_and_after_the_last() -> None:
    assert evaluations_due(eval_every=3, after=0, total_steps=8) == [3, 6, 8]
    assert evaluations_due(eval_every=3, after=6, total_steps=8) == [6, 8]
    assert evaluations_due(eval_every=4, after=7, total_steps=8) == [8]
    assert evaluations_due(eval_every=0, after=2, total_steps=8) == [8]
    assert evaluations_due(eval_every=0, after=9, total_steps=8) == []


def test_evaluations_of_any_number_of_steps_fit_into_memory() -> None:
    due = evaluations_due(eval_every=2, after=0, total_steps=10**15)

    assert (due[:2], due[-1]) == ([2, 4], 10**15)
    assert len(due) < 10**6
