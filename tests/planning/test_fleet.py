import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.planning.fleet import (
    DeviceTime,
    Prices,
    Scenario,
    Schedule,
    Speed,
    Spread,
    bounds,
    controller_turn_s,
    find_bottleneck,
    one_more,
)
from tests.planning.scenarios import make_scenario

ROOT = Path(__file__).parents[2]


def test_bounds_are_what_the_arithmetic_says() -> None:
    limits = bounds(make_scenario(workload={"controller_s": 0.5}, server=Speed(alone_s=0.9, each_s=0.1)))

    # a rollout alone: 2 + 4 * (0.5 + 1) + 3 * 2 + 1 = 15 s, on 10 devices
    assert limits["devices"] == pytest.approx(3600 * 10 / 15)
    # 10 requests at a time take 0.9 + 10 * 0.1 = 1.9 s, and a rollout has 4
    assert limits["sampling"] == pytest.approx(3600 * 10 / (4 * 1.9))
    # 100 tokens at 0.01 s
    assert limits["training"] == pytest.approx(3600)
    assert limits["controller"] == pytest.approx(3600 / (4 * 0.5))


def test_devices_that_compute_are_no_faster_than_their_processor() -> None:
    turn = DeviceTime(own=Spread(mean=2.0), computed=Spread(mean=0.5))
    few = bounds(make_scenario(workload={"turn": turn}, num_devices=1))
    many = bounds(make_scenario(workload={"turn": turn}, num_devices=100))

    # a rollout is 2 + 3 * (2 + 0.5) + 1 s of a device, 1.5 s of it computed, and 4 s of requests
    assert few["devices"] == pytest.approx(3600 / (10.5 + 4))
    assert many["devices"] == pytest.approx(3600 / 1.5)


def test_groups_that_teach_nothing_cost_the_trainer_nothing_and_ranks_share_the_rest() -> None:
    scenario = make_scenario(workload={"constant_group_frac": 0.5}, placement={"num_trainers": 4})

    assert bounds(scenario)["training"] == pytest.approx(3600 * 2 * 4)


def test_on_shared_gpus_sampling_and_training_follow_each_other() -> None:
    limits = bounds(make_scenario(placement={"is_shared": True}))

    # sampling allows 10 / 4 rollouts a second, training 1: together 1 / (0.4 + 1)
    assert limits["sampling and training"] == pytest.approx(3600 / 1.4)
    assert "sampling" not in limits
    assert "training" not in limits


def test_a_larger_screenshot_and_a_longer_prompt_cost_the_controller_more() -> None:
    costs = [controller_turn_s(kb, tokens) for kb, tokens in ((0, 0), (300, 0), (600, 0), (600, 10_000))]

    assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0])  # hashing, sending and storing bytes
    assert 0 < costs[0] < costs[1] < costs[2] < costs[3]


def test_a_turn_costs_the_controller_what_was_measured() -> None:
    """Rollouts of ten turns: a prompt has 5.5 screenshots on average, and about 750 tokens of text."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["figure"] == "controller_turns" and row["workers"] == 0]

    assert {(row["screen_kb"], row["screen_tokens"]) for row in measured} >= {(10, 60), (300, 60), (300, 2160)}
    for row in measured:
        predicted_s = controller_turn_s(row["screen_kb"], row["prompt_tokens"])
        assert 1000 * predicted_s == pytest.approx(row["cpu_ms_per_turn"], rel=0.15), row


@pytest.mark.parametrize(
    ("gains", "bottleneck"),
    [
        ({"devices": 0.08, "sampling": 0.02, "schedule": 0.0}, "devices"),
        ({"devices": 0.04, "sampling": 0.02, "schedule": 0.09}, "schedule"),
        # GPUs of their own bring nothing where sampling and training take turns
        ({"devices": 0.0, "sampling and training": 0.0, "schedule": 0.11}, "schedule"),
        # nothing helps: the part that is nearest to its bound
        ({"devices": 0.01, "sampling": -0.02, "schedule": 0.02}, "training"),
    ],
)
def test_the_bottleneck_is_what_one_more_is_worth_having_of(gains: dict[str, float], bottleneck: str) -> None:
    limits = {"devices": 3000.0, "sampling": 2500.0, "training": 2000.0}

    assert find_bottleneck(limits, gains) == bottleneck


def test_one_more_of_each_changes_one_thing_each() -> None:
    scenario = make_scenario(workload={"controller_s": 0.1}, placement={"gpus_per_server": 2}, num_devices=40)

    more = one_more(scenario)

    assert list(more) == ["sampling", "training", "devices", "controller", "schedule"]
    assert [label for label, _ in more.values()] == [
        "+ 2 GPUs for sampling",
        "+ 1 GPU for training",
        "+ 4 devices",
        "+ 1 rollout worker",
        "+ 1 step of policy lag",
    ]
    assert [one.fleet.placement.num_gpus for _, one in more.values()] == [5, 4, 3, 3, 3]
    assert more["devices"][1].fleet.num_devices == 44
    assert more["schedule"][1].schedule.max_lag == 1


def test_a_shared_gpu_gets_company_and_a_processor_does_not() -> None:
    shared = one_more(make_scenario(placement={"is_shared": True}))
    on_cpu = one_more(make_scenario(placement={"is_shared": True, "gpus_per_server": 0}))

    label, apart = shared["sampling and training"]
    assert (label, apart.fleet.placement.num_gpus) == ("+ 1 GPU, training apart", 2)
    assert list(on_cpu) == ["devices", "schedule"]


def test_gpus_and_devices_are_paid_by_the_hour_and_a_shared_gpu_once() -> None:
    prices = Prices(gpu=3.0, device=0.5)

    assert prices.per_hour(make_scenario().fleet) == 2 * 3.0 + 10 * 0.5
    assert prices.per_hour(make_scenario(placement={"is_shared": True}).fleet) == 3.0 + 10 * 0.5


SCENARIOS = st.builds(
    lambda devices, servers, trainers, alone, each, device_s, shared: make_scenario(
        workload={"start": DeviceTime(own=Spread(mean=device_s))},
        placement={"num_servers": servers, "num_trainers": trainers, "is_shared": shared},
        num_devices=devices,
        server=Speed(alone_s=alone, each_s=each),
        schedule=Schedule(groups_per_batch=4, group_size=4, max_lag=1),
    ),
    st.integers(1, 5000),
    st.integers(1, 32),
    st.integers(1, 32),
    st.floats(0.01, 100),
    st.floats(0, 10),
    st.floats(0, 100),
    st.booleans(),
)


@given(SCENARIOS)
def test_more_of_anything_lowers_no_bound(scenario: Scenario) -> None:
    before = bounds(scenario)

    fleet, placed = scenario.fleet, scenario.fleet.placement
    for more in (
        replace(fleet, num_devices=fleet.num_devices + 1),
        replace(fleet, num_controllers=2),
        replace(fleet, placement=replace(placed, num_servers=placed.num_servers + 1)),
        replace(fleet, placement=replace(placed, num_trainers=placed.num_trainers + 1)),
    ):
        after = bounds(replace(scenario, fleet=more))
        assert all(after[name] >= before[name] * (1 - 1e-9) for name in before)
