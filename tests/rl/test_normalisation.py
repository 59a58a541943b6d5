from dataclasses import replace

import pytest

from cua_rl.rl.train_step import token_weights
from cua_rl.training.config import LossConfig, Normalisation
from tests.builders import datum

# rollout "a" has 3 trained tokens in two datums, rollout "b" has 1
DATUMS = [
    datum((False, True, True), rollout_id="a"),
    datum((False, True), rollout_id="b"),
    datum((False, True), rollout_id="a"),
]


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("constant", [1 / (2 * 50)] * 3),
        ("token_mean", [1 / 4] * 3),
        ("sequence_mean", [1 / (2 * 3), 1 / 2, 1 / (2 * 3)]),
        ("token_sum", [1.0] * 3),
    ],
)
def test_every_trained_token_weighs_what_the_step_says(normalisation: Normalisation, expected: list[float]) -> None:
    loss = LossConfig(normalisation=normalisation, normalisation_tokens=50)

    assert token_weights(DATUMS, loss, num_rollouts=2) == expected


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean"])
def test_means_add_up_to_one(normalisation: Normalisation) -> None:
    weights = token_weights(DATUMS, LossConfig(normalisation=normalisation), num_rollouts=2)

    assert sum(w * d.num_trained_tokens for w, d in zip(weights, DATUMS, strict=True)) == pytest.approx(1.0)


def test_under_constant_a_token_of_a_long_rollout_weighs_as_much_as_one_of_a_short_rollout() -> None:
    short, long = datum((False, True), rollout_id="a"), datum((False, *[True] * 9), rollout_id="b")

    by_constant, by_sequence = (
        token_weights([short, long], LossConfig(normalisation=name), num_rollouts=2)
        for name in ("constant", "sequence_mean")
    )

    assert by_constant[0] == by_constant[1]
    assert by_sequence[0] == pytest.approx(9 * by_sequence[1])


@pytest.mark.parametrize("normalisation", ["constant", "sequence_mean"])
def test_a_token_weighs_the_same_however_many_of_the_other_groups_teach(normalisation: Normalisation) -> None:
    # Dr. GRPO and GRPO divide by all rollouts of the step: 8 groups of 4, of which 2 or 8 teach
    loss = LossConfig(normalisation=normalisation, normalisation_tokens=50)
    all_teach = [datum(rollout_id=str(index)) for index in range(32)]

    few = token_weights(all_teach[:8], loss, num_rollouts=32)

    assert few == token_weights(all_teach, loss, num_rollouts=32)[:8]
    assert few == [1 / (32 * {"constant": 50, "sequence_mean": 2}[normalisation])] * 8


def test_a_success_that_two_groups_compare_counts_in_each_of_them() -> None:
    # the replayed rollout has 2 tokens wherever it is compared: 4 members in all
    members = [datum(rollout_id="a", group_id="x"), datum(rollout_id="b", group_id="y")]
    replayed = [replace(datum(rollout_id="old"), group_id=group_id) for group_id in "xy"]

    weights = token_weights([*members, *replayed], LossConfig(normalisation="sequence_mean"), num_rollouts=4)

    assert weights == [1 / (4 * 2)] * 4
