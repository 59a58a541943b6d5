from cua_rl.rl.batch import build_batch, logprobs_by_turn
from tests.builders import IMAGE_TOKEN, datum, group, model_turn, prompt, rollout, text


def test_constant_groups_give_no_datums() -> None:
    turn = model_turn(prompt(text(1, 2)))
    mixed = group(rollout(turn, reward=1.0, rollout_id="a"), rollout(turn, reward=0.0, rollout_id="b"))
    constant = group(rollout(turn, reward=1.0, rollout_id="c"), rollout(turn, reward=1.0, rollout_id="d"))

    batch = build_batch([mixed, constant], "mean", IMAGE_TOKEN)

    assert [entry.rollout_id for entry in batch.datums] == ["a", "b"]
    assert batch.metrics["rollout/retokenised_tokens"] == 0.0


def test_trainer_logprobs_find_their_turns() -> None:
    merged = datum(mask=(False, True, True, False, True), turn_indices=(0, 2))

    assert logprobs_by_turn([merged], [(0.0, -0.1, -0.2, 0.0, -0.3)]) == {"r": ((0, (-0.1, -0.2)), (2, (-0.3,)))}
