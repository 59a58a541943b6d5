import pytest

from cua_rl.config import LossConfig, Normalisation
from cua_rl.rl.normalisation import token_weights
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
    assert token_weights(DATUMS, LossConfig(normalisation=normalisation, normalisation_tokens=50)) == expected


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean"])
def test_means_add_up_to_one(normalisation: Normalisation) -> None:
    weights = token_weights(DATUMS, LossConfig(normalisation=normalisation))

    assert sum(w * d.num_trained_tokens for w, d in zip(weights, DATUMS, strict=True)) == pytest.approx(1.0)


def test_under_constant_a_token_of_a_long_rollout_weighs_as_much_as_one_of_a_short_rollout() -> None:
    short, long = datum((False, True), rollout_id="a"), datum((False, *[True] * 9), rollout_id="b")

    by_constant, by_sequence = (
        token_weights([short, long], LossConfig(normalisation=name)) for name in ("constant", "sequence_mean")
    )

    assert by_constant[0] == by_constant[1]
    assert by_sequence[0] == pytest.approx(9 * by_sequence[1])
