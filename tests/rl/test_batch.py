from dataclasses import replace

import pytest

from cua_rl.environments.harness_world import HARNESS_ID
from cua_rl.rl.advantages import score_group
from cua_rl.rl.datums import Batch, build_batch, logprobs_by_turn
from cua_rl.rl.stages import build_step_batch
from cua_rl.types.rollout import RolloutGroup, StopReason
from tests.builders import IMAGE_TOKEN, datum, group, model_turn, prompt, rollout, text
from tests.rl.test_sync_loop import settings


def build(*groups: RolloutGroup, keeps_constant: bool = False) -> Batch:
    return build_batch([score_group(one, "mean") for one in groups], IMAGE_TOKEN, keeps_constant=keeps_constant)


def test_constant_groups_give_no_datums() -> None:
    turn = model_turn(prompt(text(1, 2)))
    mixed = group(rollout(turn, reward=1.0, rollout_id="a"), rollout(turn, reward=0.0, rollout_id="b"))
    constant = group(rollout(turn, reward=1.0, rollout_id="c"), rollout(turn, reward=1.0, rollout_id="d"))

    batch = build(mixed, constant)

    assert [entry.rollout_id for entry in batch.datums] == ["a", "b"]
    assert batch.metrics["rollout/retokenised_tokens"] == 0.0


def test_trainer_logprobs_find_their_turns() -> None:
    merged = datum(mask=(False, True, True, False, True), turn_indices=(0, 2))

    assert logprobs_by_turn([merged], [(0.0, -0.1, -0.2, 0.0, -0.3)]) == {"r": ((0, (-0.1, -0.2)), (2, (-0.3,)))}


def test_all_judged_rollouts_are_counted_those_of_constant_groups_too() -> None:
    turn = model_turn(prompt(text(1, 2)))
    mixed = group(rollout(turn, reward=1.0, rollout_id="a"), rollout(turn, reward=0.0, rollout_id="b"))
    constant = group(*[rollout(turn, reward=1.0, rollout_id=name) for name in "cde"])
    too_few = replace(
        group(rollout(turn, reward=1.0), faulty=[rollout(reward=None, stop_reason=StopReason.DEVICE_ERROR)]),
        is_incomplete=True,
    )

    batch = build(mixed, constant, too_few)

    assert (batch.num_rollouts, len(batch.datums)) == (5, 2)


def test_with_a_kl_term_constant_groups_keep_their_datums_and_incomplete_ones_do_not() -> None:
    turn = model_turn(prompt(text(1, 2)))
    mixed = group(rollout(turn, reward=1.0, rollout_id="a"), rollout(turn, reward=0.0, rollout_id="b"))
    constant = group(*[rollout(turn, reward=1.0, rollout_id=name) for name in "cd"])
    too_few = replace(
        group(rollout(turn, reward=1.0), faulty=[rollout(reward=None, stop_reason=StopReason.DEVICE_ERROR)]),
        is_incomplete=True,
    )

    batch = build(mixed, constant, too_few, keeps_constant=True)

    assert [entry.rollout_id for entry in batch.datums] == ["a", "b", "c", "d"]
    assert [entry.advantages[-1] for entry in batch.datums] == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(("device_id", "warns"), [(HARNESS_ID, True), ("phone", False)])
async def test_rollouts_of_a_harness_in_several_sequences_are_counted_and_warned_of(
    device_id: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    probe, first = model_turn(prompt(text(1))), model_turn(prompt(text(2)))
    split = replace(rollout(probe, first, reward=1.0, rollout_id="a"), device_id=device_id)
    whole = replace(rollout(first, reward=0.0, rollout_id="b"), device_id=device_id)

    batch = await build_step_batch(settings(), [score_group(group(split, whole), "mean")])

    assert batch.metrics["rollout/sequences/mean"] == 1.5
    assert ("2 rollouts of the harness are 3 training sequences" in caplog.text) is warns
