import pytest

from cua_rl.rl.train_step import combine_metrics, deal_datums
from tests.builders import datum


def test_the_rollouts_of_a_group_are_spread_over_the_parts() -> None:
    # two groups of four, rollout "0" in two datums that must stay together
    datums = [datum(rollout_id=name) for name in ("0", "0", "1", "2", "3", "4", "5", "6", "7")]

    parts = deal_datums(datums, 2, seed="0/3")

    names = [[datums[index].rollout_id for index in part] for part in parts]
    assert sorted(index for part in parts for index in part) == list(range(9))
    assert all(part == sorted(part) for part in parts)
    assert [len({name for name in part if name in "0123"}) for part in names] == [2, 2]
    assert [len(set(part)) for part in names] == [4, 4]
    assert deal_datums(datums, 2, seed="0/3") == parts
    assert any(deal_datums(datums, 2, seed=f"0/{step}") != parts for step in range(4, 9))


def test_one_part_is_everything_in_order_and_empty_parts_are_left_out() -> None:
    datums = [datum(rollout_id=name) for name in "cab"]

    assert deal_datums(datums, 1, seed="x") == [[0, 1, 2]]
    assert sorted(deal_datums(datums, 5, seed="x")) == [[0], [1], [2]]


def test_metrics_of_parts_become_those_of_the_step() -> None:
    first = {"optim/trained_tokens": 30.0, "loss/policy": 1.0, "policy/ratio_max": 2.0, "policy/ratio_min": 0.5}
    second = {"optim/trained_tokens": 10.0, "loss/policy": 3.0, "policy/ratio_max": 1.5, "policy/ratio_min": 0.1}

    combined = combine_metrics([first, second | {"policy/ratio_p99": 1.2, "optim/encoded_images": 4.0}])

    # (30 * 1 + 10 * 3) / 40
    assert combined["loss/policy"] == pytest.approx(1.5)
    assert combined["optim/trained_tokens"] == 40.0
    assert combined["policy/ratio_max"] == 2.0
    assert combined["policy/ratio_min"] == 0.1
    assert combined["policy/ratio_p99"] == 1.2
    assert combined["optim/encoded_images"] == 4.0
    # each was minimised by an optimizer step of its own, whatever its tokens
    of_steps = [
        first | {"loss/total": 1.0, "optim/grad_norm": 2.0},
        second | {"loss/total": 3.0, "optim/grad_norm": 6.0},
    ]
    assert (combine_metrics(of_steps)["loss/total"], combine_metrics(of_steps)["optim/grad_norm"]) == (2.0, 4.0)
    assert combine_metrics([first]) == first
