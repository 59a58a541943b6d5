from dataclasses import replace

import pytest

from cua_rl.metrics import check_names
from cua_rl.rl.parity import ParityGate, measure_parity, require_parity
from cua_rl.types.errors import ParityError
from tests.builders import datum, image, prompt, text


def test_differences_are_split_by_whether_the_turn_answers_a_new_image() -> None:
    mixed = datum(
        mask=(False, True, False, False, True),
        logprobs=(0.0, -1.0, 0.0, 0.0, -2.0),
        model_input=prompt(text(1, 2), image(expected_tokens=2), text(3)),
    )

    parity = measure_parity([mixed], [(0.0, -1.1, 0.0, 0.0, -2.4)])

    assert parity.text_mean_abs == pytest.approx(0.1)
    assert parity.image_mean_abs == pytest.approx(0.4)
    assert parity.mean_abs == pytest.approx(0.25)
    assert parity.max_abs == pytest.approx(0.4)


def test_an_answer_to_text_alone_counts_as_such_even_after_earlier_images() -> None:
    # image, turn of two tokens, text, turn of two tokens
    mixed = datum(
        mask=(False, False, True, True, False, True, True),
        logprobs=(0.0, 0.0, -1.0, -1.0, 0.0, -1.0, -1.0),
        model_input=prompt(image(expected_tokens=2), text(1, 2, 3, 4, 5)),
        turn_indices=(0, 1),
    )

    parity = measure_parity([mixed], [(0.0, 0.0, -1.4, -1.2, 0.0, -1.1, -1.0)])

    assert parity.image_mean_abs == pytest.approx((0.4 + 0.2) / 2)
    assert parity.text_mean_abs == pytest.approx(0.1 / 2)
    assert parity.first_token_mean_abs == pytest.approx((0.4 + 0.1) / 2)
    assert parity.later_token_mean_abs == pytest.approx(0.2 / 2)
    check_names(parity.metrics())


def test_turns_of_other_versions_are_left_out_but_not_what_they_answered() -> None:
    # image, a turn of version 3, text, a turn of version 4: only that one is compared, and it answers text alone
    mixed = datum(
        mask=(False, False, True, False, True),
        logprobs=(0.0, 0.0, -1.0, 0.0, -1.0),
        model_input=prompt(image(expected_tokens=2), text(1, 2, 3)),
        turn_indices=(0, 1),
    )
    mixed = replace(mixed, policy_versions=(3, 4))

    metrics = ParityGate(limit=0.25, step=5, policy_version=4).check([mixed], [(0.0, 0.0, -9.0, 0.0, -1.1)])

    assert metrics["policy/parity_mean_abs"] == metrics["policy/parity_text_mean_abs"] == pytest.approx(0.1)
    assert "policy/parity_image_mean_abs" not in metrics


def test_a_gap_above_the_limit_is_refused_with_its_likely_causes() -> None:
    parity = measure_parity([datum()], [(0.0, -1.2, -1.2)])

    require_parity(parity, 0.25, step=0)
    with pytest.raises(ParityError, match=r"step 0: expected .* within 0.05 nats .* got 0.2000 .*M-RoPE"):
        require_parity(parity, 0.05, step=0)


def test_a_gap_that_is_not_a_number_is_refused() -> None:
    parity = measure_parity([datum()], [(0.0, float("nan"), -1.0)])

    with pytest.raises(ParityError):
        require_parity(parity, 100.0, step=3)
