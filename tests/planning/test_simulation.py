"""The real loops in virtual time: durations that can be worked out by hand."""

from dataclasses import replace

import pytest

from cua_rl.planning.fleet import DeviceTime, Schedule, Speed, Spread, bounds
from cua_rl.planning.simulation import predict, simulate
from tests.planning.scenarios import make_scenario


def test_a_synchronous_step_is_its_phases_one_after_the_other() -> None:
    scenario = make_scenario(save_s=1.0, publish_s=2.0, overhead_s=0.05)

    ends = simulate(scenario, 3)

    # ten rollouts on ten devices 13 s, training 10 * 100 * 0.01 = 10 s, publication 3 s, and 10 * 0.05 s of overhead
    # before the end of the step is logged; the first policy is published before the first step
    assert [end.at_s for end in ends] == [pytest.approx(3 + 26.5 * step, abs=0.01) for step in (1, 2, 3)]
    assert ends[-1].trainer_busy_s == pytest.approx(30, abs=0.01)
    assert ends[-1].device_busy_s == pytest.approx(3 * 10 * 13, abs=0.1)


def test_half_the_devices_take_two_rounds() -> None:
    prediction = predict(make_scenario(num_devices=5))

    # two rounds of 13 s, then 10 s of training
    assert prediction.steps_per_hour == pytest.approx(3600 / 36, rel=1e-3)
    assert prediction.device_busy_frac == pytest.approx(26 / 36, rel=1e-3)
    assert prediction.trainer_busy_frac == pytest.approx(10 / 36, rel=1e-3)
    assert prediction.policy_lag_max == 0


def test_with_a_policy_lag_of_one_two_batches_are_under_way() -> None:
    schedule = Schedule(groups_per_batch=5, group_size=2, max_lag=1)

    prediction = predict(make_scenario(schedule=schedule, num_devices=20))

    # policy s lets the rollouts for step s + 2 start: 13 s, then 10 s of training; the other batch is in between
    assert prediction.steps_per_hour == pytest.approx(2 * 3600 / 23, rel=1e-3)
    assert prediction.policy_lag_max == 1


def test_with_enough_policy_lag_the_slowest_part_sets_the_pace() -> None:
    schedule = Schedule(groups_per_batch=5, group_size=2, max_lag=3)

    prediction = predict(make_scenario(schedule=schedule, num_devices=40))

    # devices allow a step in 3.25 s, training takes 10
    assert prediction.rollouts_per_hour == pytest.approx(3600, rel=0.05)
    assert prediction.trainer_busy_frac > 0.95
    assert prediction.policy_lag_max == 3


def test_constant_groups_are_not_trained_on() -> None:
    ends = simulate(make_scenario(workload={"constant_group_frac": 1.0}), 2)

    assert ends[-1].trainer_busy_s == 0
    assert ends[-1].at_s == pytest.approx(26, abs=0.01)


def test_a_shared_gpu_makes_server_and_trainer_slow_each_other() -> None:
    schedule = Schedule(groups_per_batch=5, group_size=2, max_lag=2)
    apart = make_scenario(schedule=schedule, server=Speed(alone_s=0.0, each_s=0.2), num_devices=30)
    shared = replace(apart, fleet=replace(apart.fleet, placement=replace(apart.fleet.placement, is_shared=True)))

    # a step is 10 * 4 * 0.2 = 8 s of sampling and 10 s of training: side by side, or one after the other
    assert predict(apart).steps_per_hour == pytest.approx(360, rel=0.1)  # every tenth step waits for parity
    assert predict(shared).steps_per_hour == pytest.approx(200, rel=0.05)


def test_devices_that_compute_wait_for_each_other_and_on_a_processor_for_the_trainer_too() -> None:
    schedule = Schedule(groups_per_batch=5, group_size=2, max_lag=2)
    on_cpu = {"is_shared": True, "gpus_per_server": 0}
    turn = DeviceTime(own=Spread(mean=1.0), computed=Spread(mean=0.3))
    # a step has ten rollouts with three such times each, 9 s of the processor, and 10 s of training
    apart = make_scenario(workload={"turn": turn}, schedule=schedule, num_devices=60)
    shared = replace(apart, fleet=replace(apart.fleet, placement=replace(apart.fleet.placement, **on_cpu)))

    assert predict(apart).steps_per_hour > 290  # 360 if no batch ever waited
    assert predict(shared).steps_per_hour == pytest.approx(3600 / 19, rel=0.1)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_simulation_passes_its_bounds(max_lag: int) -> None:
    scenario = make_scenario(
        workload={"turns": (1, 2, 3, 10), "turn": DeviceTime(own=Spread(mean=2.0, sigma=1.0)), "controller_s": 0.05},
        placement={"num_servers": 2},
        server=Speed(alone_s=0.5, each_s=0.3),
        schedule=Schedule(groups_per_batch=6, group_size=4, max_lag=max_lag),
    )

    prediction = predict(scenario)

    assert prediction.rollouts_per_hour <= 1.1 * min(bounds(scenario).values())  # a window of few steps varies
    assert prediction.device_busy_frac <= 1
    assert prediction == predict(scenario)  # and is the same every time
