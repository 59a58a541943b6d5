from datetime import UTC, datetime, timedelta

import pytest

from cua_rl.planning.calibration import (
    Interval,
    Load,
    RecordedRollout,
    RecordedRun,
    RecordedStep,
    calibrate,
    fit_speed,
    measure_loads,
)
from cua_rl.planning.fleet import Placement, Speed
from tests.planning.scenarios import PLACEMENT


def interval(start_s: float, end_s: float) -> Interval:
    return Interval(start_s=start_s, end_s=end_s)


def test_the_load_is_the_mean_number_in_progress() -> None:
    requests = [interval(0, 4), interval(2, 4), interval(3, 5), interval(7, 7)]

    loads = measure_loads(requests, requests)

    # 0-2: 1, 2-3: 2, 3-4: 3, 4-5: 1; the one without a length says nothing
    assert loads == [
        Load(duration_s=4, number=pytest.approx(7 / 4)),
        Load(duration_s=2, number=pytest.approx(5 / 2)),
        Load(duration_s=2, number=pytest.approx(4 / 2)),
    ]


def test_places_share_the_load_and_nobody_is_less_than_one() -> None:
    requests = [interval(0, 1)] * 4

    assert [load.number for load in measure_loads(requests, requests, num_places=2)] == [2] * 4
    assert [load.number for load in measure_loads(requests, requests, num_places=8)] == [1] * 4


@pytest.mark.parametrize("speed", [Speed(alone_s=0.5, each_s=0.1), Speed(alone_s=0.0, each_s=0.2)])
def test_the_speed_behind_durations_is_found(speed: Speed) -> None:
    loads = [Load(duration_s=speed.request_s(number), number=number) for number in (1, 2, 5, 30)]

    found, sigma = fit_speed(loads)

    assert (found.alone_s, found.each_s) == (pytest.approx(speed.alone_s), pytest.approx(speed.each_s))
    assert sigma == pytest.approx(0, abs=1e-9)


def test_durations_that_do_not_grow_with_the_load_are_each_requests_own() -> None:
    speed, _ = fit_speed([Load(duration_s=3 / number, number=number) for number in (1.0, 2.0, 4.0)])
    alike, _ = fit_speed([Load(duration_s=3, number=2)] * 3)

    assert speed.each_s == 0
    assert alike == Speed(alone_s=3, each_s=0)


def test_a_run_tells_what_its_parts_took() -> None:
    """Two steps of two rollouts, never two at a time on the device or in the server: nobody slows anybody."""
    steps, rollouts = list[RecordedStep](), list[RecordedRollout]()
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for step in range(2):
        for member in range(2):
            at = 100 * step + 50 * member
            # 5 s until the first request, which takes 1 s; 2 s on the device; another request; 2 s and then 3 more
            requests = (interval(at + 5, at + 6), interval(at + 8, at + 9))
            rollouts.append(RecordedRollout(run=interval(at, at + 14), requests=requests))
        metrics = {
            "rollout/num_rollouts": 2.0,
            "rollout/num_turns/mean": 2.0,
            "rollout/datum_tokens": 400.0,
            "reward/constant_group_frac": 0.5,
            "time/step_s": 99.0,
            "time/train_s": 8.0,
            "time/publish_s": 1.5,
        }
        steps.append(RecordedStep(ended_at=began + timedelta(seconds=100 * step), metrics=metrics))
    run = RecordedRun(
        rollouts=tuple(rollouts), steps=tuple(steps), placement=Placement(**PLACEMENT | {"num_trainers": 4})
    )

    found = calibrate([run])

    assert found.turns == (2, 2, 2, 2)
    assert (found.start_s, found.turn_s.mean, found.end_s) == (pytest.approx(5), pytest.approx(2), pytest.approx(3))
    assert found.server == Speed(alone_s=pytest.approx(1), each_s=pytest.approx(0))
    # four turns a step, half of them in groups that teach
    assert found.turn_tokens == pytest.approx(400 / 2)
    # 4 ranks for 8 s
    assert found.trained_token_s == pytest.approx(4 * 8 / 400)
    assert (found.publish_s, found.save_s, found.overhead_s) == (1.5, 0, pytest.approx(1))
