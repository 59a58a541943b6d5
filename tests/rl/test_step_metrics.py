"""What a step says about its rollouts, in numbers worked by hand."""

from dataclasses import replace
from itertools import product

import pytest

from cua_rl.metrics import check_names
from cua_rl.rl.curriculum import build_outcome
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.types.rollout import Rollout, RolloutGroup, StopReason
from tests.builders import group, model_turn, prompt, rollout, text


def attempt(reward: float | None, num_turns: int = 1, duration_s: float = 1.0, member_index: int = 0) -> Rollout:
    turn = model_turn(prompt(text(1, 2, 3)))
    stop = StopReason.FINISHED if reward is not None else StopReason.DEVICE_ERROR
    made = rollout(*[turn] * num_turns, reward=reward, stop_reason=stop, member_index=member_index)
    return replace(made, duration_s=duration_s)


def test_rewards_are_spread_over_groups_and_inside_them() -> None:
    groups = [
        replace(group(attempt(1.0), attempt(0.0)), category="app"),
        replace(group(attempt(1.0), attempt(1.0)), category="app"),
        replace(group(attempt(0.0), attempt(0.0)), category="settings"),
    ]

    metrics = rollout_metrics(groups)

    check_names(metrics)
    # three of six rollouts: mean 1/2, deviation 1/2; inside the groups 1/2, 0 and 0
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.5)
    assert metrics["reward/std_in_group"] == pytest.approx(1 / 6)
    assert metrics["reward/all_failed_group_frac"] == metrics["reward/all_solved_group_frac"] == pytest.approx(1 / 3)
    assert (metrics["reward/success_rate/app"], metrics["reward/success_rate/settings"]) == (0.75, 0.0)


def test_attempts_after_a_fault_are_retries() -> None:
    faulty = [attempt(None, member_index=0), attempt(None, member_index=1), attempt(None, member_index=1)]
    members = [attempt(1.0, member_index=0), attempt(0.0, member_index=2)]

    metrics = rollout_metrics([group(*members, faulty=faulty)])

    # five attempts at three places
    assert (metrics["rollout/num_faults"], metrics["rollout/num_retries"]) == (3, 2)


def test_durations_are_those_of_rollouts_and_of_requests() -> None:
    rollouts = [attempt(1.0, duration_s=float(seconds)) for seconds in range(1, 11)]

    metrics = rollout_metrics([group(*rollouts)])

    assert (metrics["time/rollout_s/p90"], metrics["time/rollout_s/max"]) == (9.0, 10.0)
    assert metrics["time/sampling_s/mean"] == pytest.approx(0.1)


def test_answers_that_were_cut_off_and_actions_that_were_refused_are_counted() -> None:
    whole = attempt(1.0, num_turns=3)
    cut = replace(whole.turns[0], model=replace(whole.turns[0].model, stop="length"))
    refused = replace(whole.turns[1], agent=replace(whole.turns[1].agent, action_error="there is no such app"))

    metrics = rollout_metrics([group(replace(whole, turns=(cut, refused, *whole.turns[2:])), attempt(0.0))])

    # one of four turns each; two sampled tokens in every turn
    assert (metrics["rollout/truncated_turn_frac"], metrics["rollout/action_error_frac"]) == (0.25, 0.25)
    assert (metrics["rollout/sampled_tokens_per_turn/mean"], metrics["rollout/num_turns/max"]) == (2.0, 3.0)


def test_faults_are_counted_by_the_worker_that_met_them() -> None:
    faulty = [replace(attempt(None), worker=worker) for worker in ("worker-1", "worker-3", "worker-3", None)]

    metrics = rollout_metrics([group(attempt(1.0), faulty=faulty)])

    check_names(metrics)
    counts = {name: value for name, value in metrics.items() if "worker_faults" in name}
    assert counts == {"rollout/worker_faults/worker-1": 1.0, "rollout/worker_faults/worker-3": 2.0}


def test_a_step_that_lost_every_rollout_has_metrics_too() -> None:
    metrics = rollout_metrics([group(faulty=[attempt(None)])])

    check_names(metrics)
    assert (metrics["reward/mean"], metrics["rollout/num_turns/max"], metrics["time/rollout_s/max"]) == (0.0, 0.0, 0.0)


def test_siblings_whose_number_depends_on_their_parent_do_not_shift_success_and_reward() -> None:
    """A policy that solves the task in its first turn, or else never: half of its rollouts are solved."""
    groups: list[RolloutGroup] = []
    for outcomes in product((1.0, 0.0), repeat=4):  # all equally likely; the last one is the parent
        members = [
            replace(attempt(reward, num_turns=1 if reward else 3, member_index=place), rollout_id=f"r{place}")
            for place, reward in enumerate(outcomes)
        ]
        if not all(outcomes[:3]) and not outcomes[3]:  # it goes on beyond its first turn, where siblings begin
            siblings = [attempt(0.0, num_turns=3, member_index=place) for place in (4, 5)]
            members += [
                replace(one, rollout_id=f"s{place}", parent_id="r3", fork_turn=1) for place, one in enumerate(siblings)
            ]
        groups.append(replace(group(*members), category="app"))

    metrics = rollout_metrics(groups)

    names = ("reward/mean", "reward/success_rate", "reward/success_rate/app", "reward/parts/success")
    assert {metrics[name] for name in names} == {0.5}
    assert metrics["rollout/num_rollouts"] == 16 * 4 + 7 * 2
    outcomes = [build_outcome(one) for one in groups]
    assert {one.num_rollouts for one in outcomes} == {4}
    assert sum(one.num_successes for one in outcomes) == 32


def test_members_of_a_rollout_that_was_taken_over_count_as_their_parent_is_in_no_group_of_theirs() -> None:
    taken_over = [replace(attempt(1.0), parent_id="elsewhere", fork_turn=1, rollout_id=name) for name in "ab"]

    assert rollout_metrics([group(*taken_over)])["reward/success_rate"] == 1.0
