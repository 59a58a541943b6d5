from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cua_rl.planning.calibration import (
    Interval,
    Load,
    RecordedRollout,
    RecordedRun,
    RecordedStep,
    calibrate,
    constant_frac,
    fit_speed,
    measure_loads,
)
from cua_rl.planning.fleet import Placement, Speed, controller_turn_s
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


def test_what_devices_compute_is_told_from_their_own_time_by_how_they_slow_each_other() -> None:
    """A rollout alone takes 1 s until its first request; of ten that begin together, each takes 5.5 s."""
    rollouts = [
        RecordedRollout(step=step, run=interval(at, at + took + 1), requests=(interval(at + took, at + took + 1),))
        for step in (1, 2)
        for at, took, number in ((100 * step, 1.0, 1), (100 * step + 50, 5.5, 10))
        for _ in range(number)
    ]
    metrics = {"rollout/num_rollouts": 11.0, "rollout/num_turns/mean": 1.0, "rollout/datum_tokens": 1.0}
    metrics |= {"reward/constant_group_frac": 0.0, "time/step_s": 100.0}
    steps = tuple(
        RecordedStep(step=step, ended_at=datetime(2026, 1, 1, tzinfo=UTC), metrics=metrics) for step in (1, 2)
    )
    on_cpu = Placement(**PLACEMENT | {"gpus_per_server": 0})
    run = RecordedRun(rollouts=tuple(rollouts), steps=steps, group_size=2, placement=on_cpu, screen_kb=300)

    work = calibrate([run], group_size=2, num_devices=1)[0]

    assert (work.start.own.mean, work.start.computed.mean) == (pytest.approx(0.5), pytest.approx(0.5))
    assert work.controller_s == 0  # one processor does all, and how much of it is the controller's cannot be told

    beside_gpus = replace(run, placement=Placement(**PLACEMENT))
    work = calibrate([beside_gpus, replace(beside_gpus, screen_kb=100)], group_size=2, num_devices=1)[0]

    assert work.controller_s == pytest.approx(controller_turn_s(200, 1 / 2 * 1 / 11))
    assert work.start.own.mean == pytest.approx(0.5)
    assert work.start.computed.mean == pytest.approx(0.5 - work.controller_s)


def test_a_run_tells_what_its_parts_took() -> None:
    """Two rollouts a step, never two at a time on the device or in the server: nobody slows anybody."""
    steps, rollouts = list[RecordedStep](), list[RecordedRollout]()
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for step in range(4):
        slowness = 3 if step == 0 else 1  # cold caches, which say nothing of the steps after
        for member in range(2):
            at = 200 * step + 60 * member
            # 5 s until the first request, which takes 1 s; 2 s on the device; another request; 3 s until the reward
            ends = [at + slowness * seconds for seconds in (0, 5, 6, 8, 9, 12)]
            requests = (interval(*ends[1:3]), interval(*ends[3:5]))
            rollouts.append(RecordedRollout(step=step, run=interval(ends[0], ends[5]), requests=requests))
        metrics = {
            "rollout/num_rollouts": 2.0,
            "rollout/num_turns/mean": 2.0,
            "rollout/datum_tokens": 400.0,
            "reward/constant_group_frac": 0.5,
            "reward/success_rate": 0.5,
            "time/step_s": 20.0 if step == 2 else 199.0,  # an evaluation before it began
            "time/datums_s": 0.5,
            "time/train_s": 8.0 * slowness,
            "time/publish_s": 1.5 * slowness,
        }
        steps.append(RecordedStep(step=step, ended_at=began + timedelta(seconds=200 * step), metrics=metrics))
    run = RecordedRun(
        rollouts=tuple(rollouts),
        steps=tuple(steps),
        group_size=2,
        placement=Placement(**PLACEMENT | {"num_trainers": 4}),
        screen_kb=300,
    )
    controller_s = controller_turn_s(300, 200.0)  # two turns of 200 tokens each: one on average

    found, fleet = calibrate([run], group_size=2, num_devices=1)

    assert found.turns == (2,) * 8
    device_s = [time.own.mean for time in (found.start, found.turn, found.end)]
    assert device_s == pytest.approx([5 - controller_s, 2 - controller_s, 3])
    assert found.turn.computed.mean == pytest.approx(0)
    assert fleet.server == Speed(alone_s=pytest.approx(1), each_s=pytest.approx(0))
    # four turns a step, half of them in groups that teach
    assert found.turn_tokens == pytest.approx(400 / 2)
    # 4 ranks for 8 s
    assert fleet.trained_token_s == pytest.approx(4 * 8 / 400)
    assert (fleet.publish_s, fleet.save_s) == (1.5, 0)
    # half a second for datums and one between steps, for two rollouts
    assert fleet.overhead_s == pytest.approx(1.5 / 2)
    assert found.constant_group_frac == 0.5
    nothing = {"rollout/num_rollouts": 0.0, "reward/constant_group_frac": 1.0}
    faulty = replace(steps[2], metrics=steps[2].metrics | nothing)
    with_faults = replace(run, steps=(*steps[:2], faulty, steps[3]))
    assert calibrate([with_faults], group_size=2, num_devices=1)[1].overhead_s == pytest.approx(1.5 / 2)
    # of two, half are constant if all tasks succeed half of the time; so of eight, hardly any are
    of_eight, _ = calibrate([run], group_size=8, num_devices=1)
    assert of_eight.constant_group_frac == pytest.approx(2 * 0.5**8, abs=1e-3)


@pytest.mark.parametrize(
    ("concentration", "group_size", "frac"),
    [
        (1e9, 3, 2 * 0.5**3),  # all tasks succeed half of the time
        (1e-9, 3, 1.0),  # tasks always or never succeed
        (2.0, 3, 2 / 4),  # every chance is as likely as the others: 0 to 3 successes, too
    ],
)
def test_groups_are_constant_as_often_as_their_tasks_differ(concentration: float, group_size: int, frac: float) -> None:
    assert constant_frac(0.5, concentration, group_size) == pytest.approx(frac)
