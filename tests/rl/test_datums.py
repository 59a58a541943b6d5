from dataclasses import replace

from cua_rl.rl.datums import ForkReason, build_datums, count_retokenised, datums_sha256
from tests.builders import IMAGE_TOKEN, image, model_turn, prompt, rollout, text


def test_turns_that_extend_each_other_become_one_datum() -> None:
    first = model_turn(prompt(text(1, 2), image(b"a"), text(3)), sampled=(7, 8), logprobs=(-0.1, -0.2))
    second = model_turn(
        prompt(text(1, 2), image(b"a"), text(3, 7, 8, 4), image(b"b"), text(5)), sampled=(6,), logprobs=(-0.3,)
    )

    built = build_datums(rollout(first, second), 0.5, IMAGE_TOKEN)

    (datum,) = built.datums
    # 1 2 [a a] 3 7 8 4 [b b] 5 6: the sampled tokens are at 5, 6 and 11
    assert datum.model_input.token_ids(IMAGE_TOKEN) == [1, 2, 9, 9, 3, 7, 8, 4, 9, 9, 5, 6]
    assert [position for position, flag in enumerate(datum.loss_mask) if flag] == [5, 6, 11]
    assert [datum.sampling_logprobs[position] for position in (5, 6, 11)] == [-0.1, -0.2, -0.3]
    assert datum.advantages[5] == 0.5
    assert datum.advantages[4] == 0.0
    assert datum.turn_indices == (0, 1)
    assert not built.forks


def test_an_edited_history_starts_a_new_datum() -> None:
    first = model_turn(prompt(text(1, 2)), sampled=(7,))
    second = model_turn(prompt(text(1, 3, 7, 4)), sampled=(8,))

    built = build_datums(rollout(first, second), 1.0, IMAGE_TOKEN)

    assert len(built.datums) == 2
    assert built.forks == {ForkReason.HISTORY_CHANGED: 1}


def test_an_answer_that_comes_back_as_other_tokens_starts_a_new_datum() -> None:
    first = model_turn(prompt(text(1, 2)), sampled=(7, 8))
    second = model_turn(prompt(text(1, 2, 78, 4)), sampled=(6,))

    built = build_datums(rollout(first, second), 1.0, IMAGE_TOKEN)

    assert built.forks == {ForkReason.ANSWER_RETOKENISED: 1}


def test_another_image_at_the_same_place_starts_a_new_datum() -> None:
    first = model_turn(prompt(text(1), image(b"a"), text(2)), sampled=(7,))
    second = model_turn(prompt(text(1), image(b"b"), text(2, 7, 3)), sampled=(8,))

    built = build_datums(rollout(first, second), 1.0, IMAGE_TOKEN)

    assert built.forks == {ForkReason.IMAGE_CHANGED: 1}


def test_trained_tokens_are_the_sampled_ones_and_a_difference_is_counted() -> None:
    played = rollout(model_turn(prompt(text(1, 2)), sampled=(7, 8)))
    datums = build_datums(played, 1.0, IMAGE_TOKEN).datums

    assert count_retokenised(datums, [played], IMAGE_TOKEN) == 0
    other = rollout(model_turn(prompt(text(1, 2)), sampled=(7, 5)))
    assert count_retokenised(datums, [other], IMAGE_TOKEN) == 1


def test_the_fingerprint_sees_the_last_bit_of_a_log_probability() -> None:
    datums = build_datums(rollout(model_turn(prompt(text(1)), sampled=(7,), logprobs=(-0.1,))), 1.0, IMAGE_TOKEN).datums
    moved = replace(datums[0], sampling_logprobs=(0.0, -0.1 - 2**-56))

    assert datums_sha256(datums) == datums_sha256(list(datums))
    assert datums_sha256(datums) != datums_sha256([moved])


def test_a_grammar_goes_with_the_turn_that_was_held_to_it_into_the_fingerprint_too() -> None:
    first = replace(model_turn(prompt(text(1, 2)), sampled=(7, 8)), grammar="one")
    free = model_turn(prompt(text(1, 2, 7, 8, 4)), sampled=(6,))
    last = replace(model_turn(prompt(text(1, 2, 7, 8, 4, 6), image(b"a"), text(5)), sampled=(3,)), grammar="two")

    (datum,) = build_datums(rollout(first, free, last), 0.5, IMAGE_TOKEN).datums

    assert datum.grammars == ((2, "one"), (9, "two"))  # 1 2 [7 8] 4 [6] a a 5 [3]
    others = [replace(datum, grammars=one) for one in ((), datum.grammars[:1], ((2, "two"), (9, "one")))]
    assert len({datums_sha256([one]) for one in (datum, *others)}) == 4
