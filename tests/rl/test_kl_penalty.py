import pytest

from cua_rl.rl.advantages import penalise_divergence
from tests.builders import datum


def test_tokens_above_the_base_model_lose_advantage_and_the_mean_is_kept() -> None:
    # gaps: -1 - (-1) = 0 and -1 - (-3) = 2, mean 1; advantages 1 + 0.1 * (1 - 0) and 1 + 0.1 * (1 - 2)
    penalised, mean = penalise_divergence([datum()], [(0.0, -1.0, -3.0)], 0.1)

    assert mean == pytest.approx(1.0)
    assert penalised[0].advantages == pytest.approx((0.0, 1.1, 0.9))


def test_tokens_off_the_mask_keep_their_zeros() -> None:
    penalised, _ = penalise_divergence([datum(mask=(False, True, False))], [(5.0, -2.0, 5.0)], 1.0)

    assert penalised[0].advantages[0] == penalised[0].advantages[2] == 0.0


def test_nothing_leaks_into_the_prompt_between_two_turns_or_from_one_turn_to_another() -> None:
    # prompt, turn, prompt, turn: only the second turn has left the base model
    two_turns = datum(mask=(False, True, False, True), turn_indices=(0, 1))

    penalised, _ = penalise_divergence([two_turns], [(0.0, -1.0, 0.0, -5.0)], 0.5)

    # gaps 0 and 4, mean 2: advantages 1 + 0.5 * 2 and 1 - 0.5 * 2, and exact zeros between
    assert penalised[0].advantages == (0.0, 2.0, 0.0, 0.0)
