import pytest

from cua_rl.rl.advantages import divide_by_batch_std, group_advantages, score_group
from cua_rl.rl.config import RolloutAdvantageKind
from tests.builders import datum, group, model_turn, prompt, rollout, text

KINDS: tuple[RolloutAdvantageKind, ...] = ("mean", "mean_std", "leave_one_out", "batch_std")


def test_rewards_are_centred_in_their_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "mean") == (0.5, -0.5, -0.5, 0.5)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "batch_std") == (0.5, -0.5, -0.5, 0.5)


def test_division_by_the_population_standard_deviation() -> None:
    # mean 1/4, centred 3/4 -1/4 -1/4 -1/4, variance (9 + 3) / 64 = 3/16, std sqrt(3)/4
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "mean_std") == pytest.approx(
        (3 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5)
    )


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 1 against 0; 0 against (1 + 0 + 0) / 3
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "leave_one_out") == pytest.approx((1.0, -1 / 3, -1 / 3, -1 / 3))
    # .9 against (.5 + .1) / 2; .5 against .5; .1 against .7
    assert group_advantages([0.9, 0.5, 0.1], "leave_one_out") == pytest.approx((0.6, 0.0, -0.6))


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_group_gets_exact_zeros_even_where_the_mean_is_rounded(kind: RolloutAdvantageKind) -> None:
    for reward, size in ((0.1, 8), (0.9, 8), (1 / 3, 7), (0.1, 3)):
        assert group_advantages([reward] * size, kind) == (0.0,) * size
    assert group_advantages([0.7], kind) == (0.0,)
    assert group_advantages([], kind) == ()
    single = group(rollout(model_turn(prompt(text(1))), reward=0.1))
    assert score_group(single, kind).advantages == (0.0,)


def test_rewards_that_differ_are_never_taken_for_constant() -> None:
    assert group_advantages([0.1, 0.1 + 1e-12], "mean_std") == pytest.approx((-1.0, 1.0))


def test_batch_normalisation_divides_by_the_deviation_over_rollouts_whatever_their_length() -> None:
    # advantages 3, -3, 0.5, -0.5 of four rollouts: variance (9 + 9 + .25 + .25) / 4 = 4.625; the first has two datums
    long, split = datum(advantages=(0.0, 3.0, 3.0), rollout_id="a"), datum((False, True), (0.0, 3.0), rollout_id="a")
    others = [datum((False, True), (0.0, value), rollout_id=str(value)) for value in (-3.0, 0.5, -0.5)]

    datums, std = divide_by_batch_std([long, split, *others])

    assert std == pytest.approx(4.625**0.5)
    assert [one.advantages[1] for one in datums] == pytest.approx([v / std for v in (3, 3, -3, 0.5, -0.5)])
    assert datums[0].advantages[0] == 0.0


def test_a_batch_without_deviation_is_left_as_it_is() -> None:
    datums, std = divide_by_batch_std([datum(advantages=(0.0, 0.5, 0.5))])

    assert std == 0.0
    assert datums[0].advantages == (0.0, 0.5, 0.5)


def test_groups_that_teach_nothing_do_not_count_in_the_batch_deviation() -> None:
    # with a KL term their datums are in the step too: 3 and -3 have the deviation 3 with or without them
    taught = [datum((False, True), (0.0, value), rollout_id=str(value), group_id="a") for value in (3.0, -3.0)]
    constant = [datum((False, True), (0.0, 0.0), rollout_id=name, group_id="b") for name in "cd"]

    datums, std = divide_by_batch_std([*taught, *constant])

    assert std == 3.0
    assert [one.advantages[1] for one in datums] == [1.0, -1.0, 0.0, 0.0]


def test_a_success_that_two_groups_compare_has_an_advantage_in_each() -> None:
    pairs = [("old", "a", 2.0), ("x", "a", -2.0), ("old", "b", 1.0), ("y", "b", -1.0)]
    datums = [datum((False, True), (0.0, value), rollout_id=name, group_id=group) for name, group, value in pairs]

    assert divide_by_batch_std(datums)[1] == pytest.approx(2.5**0.5)  # (4 + 4 + 1 + 1) / 4
