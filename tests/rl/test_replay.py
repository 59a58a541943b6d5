from dataclasses import replace

import pytest

from cua_rl.rl.advantages import score_group
from cua_rl.rl.curriculum import ReplayBuffer, first_success, replay_metrics
from cua_rl.rl.datums import build_batch, logprobs_by_turn
from cua_rl.rl.train_step import ratio_metrics
from cua_rl.types.rollout import Rollout, RolloutGroup
from tests.builders import IMAGE_TOKEN, datum, group, model_turn, prompt, rollout, text


def solved(rollout_id: str, task_id: str = "task", policy_version: int = 0) -> Rollout:
    turn = model_turn(prompt(text(1, 2)), policy_version=policy_version)
    return replace(rollout(turn, reward=1.0, rollout_id=rollout_id), task_id=task_id)


def failed_group(index: int = 0) -> RolloutGroup:
    turn = model_turn(prompt(text(1, 2)), policy_version=5)
    members = [rollout(turn, reward=0.0, rollout_id=f"failed-{member}", member_index=member) for member in range(3)]
    return replace(group(*members), index=index)


def buffer(*successes: Rollout, capacity: int = 2) -> ReplayBuffer:
    made = ReplayBuffer(capacity_per_task=capacity)
    made.add(successes)
    return made


def test_a_stored_success_joins_a_group_in_which_every_member_failed() -> None:
    joined = buffer(solved("old")).join(failed_group())

    assert [entry.rollout_id for entry in joined.replayed] == ["old"]
    assert joined.compared_rewards == [0.0, 0.0, 0.0, 1.0]
    assert joined.rewards == [0.0, 0.0, 0.0]
    assert not joined.is_constant


def test_a_group_with_a_success_or_without_rewards_is_left_alone() -> None:
    stored = buffer(solved("old"))
    mixed, empty = group(rollout(reward=1.0), rollout(reward=0.0)), group()

    assert stored.join(mixed) is mixed
    assert stored.join(empty) is empty


def test_successes_of_other_tasks_do_not_join() -> None:
    failed = failed_group()

    assert buffer(solved("other", task_id="another")).join(failed) is failed


def test_the_buffer_keeps_the_newest_and_spreads_them_over_groups() -> None:
    stored = buffer(solved("a"), solved("b"), solved("c"))

    chosen = [stored.join(failed_group(index)).replayed[0].rollout_id for index in range(3)]

    assert stored.num_stored == 2
    assert chosen == ["c", "b", "c"]


def test_without_capacity_nothing_is_kept() -> None:
    assert buffer(solved("a"), capacity=0).num_stored == 0


def test_a_group_leaves_its_first_success() -> None:
    mixed = group(rollout(reward=0.0, rollout_id="a"), solved("b"), solved("c"))

    success = first_success(mixed)

    assert success is not None
    assert success.rollout_id == "b"
    assert first_success(failed_group()) is None


def test_the_batch_holds_the_replayed_datum_with_its_own_logprobs_and_policy_version() -> None:
    joined = buffer(solved("old", policy_version=2)).join(failed_group())

    batch = build_batch([score_group(joined, "mean")], IMAGE_TOKEN)

    assert [entry.rollout_id for entry in batch.datums] == ["failed-0", "failed-1", "failed-2", "old"]
    assert batch.datums[-1].policy_versions == (2,)
    assert batch.datums[-1].advantages == (0.0, 0.0, 0.75, 0.75)  # mean reward 1/4
    assert batch.datums[0].advantages[-1] == -0.25
    assert batch.replayed_ids == {"old"}
    assert batch.metrics["rollout/retokenised_tokens"] == 0.0


def test_one_success_may_join_several_groups_of_a_step() -> None:
    stored = buffer(solved("old"), capacity=1)

    groups = [replace(failed_group(index), group_id=f"g{index}") for index in range(2)]
    batch = build_batch([score_group(stored.join(one), "mean") for one in groups], IMAGE_TOKEN)

    assert [entry.rollout_id for entry in batch.datums].count("old") == 2
    assert batch.metrics["rollout/sequences/mean"] == 1.0  # eight members, a sequence each
    assert batch.metrics["rollout/retokenised_tokens"] == 0.0


def test_trainer_logprobs_of_replayed_rollouts_are_left_out_of_the_record() -> None:
    fresh, old = datum(rollout_id="fresh"), datum(rollout_id="old")

    by_rollout = logprobs_by_turn([fresh, old], [(0.0, -1.0, -1.0)] * 2, leave_out={"old"})

    assert set(by_rollout) == {"fresh"}


def test_metrics_tell_how_old_the_replayed_turns_are() -> None:
    stored = buffer(solved("a", policy_version=1), solved("b", policy_version=4))
    groups = [stored.join(failed_group(0)), stored.join(failed_group(1)), group(rollout(reward=1.0))]

    assert replay_metrics(groups, policy_version=5) == {
        "replay/num_rollouts": 2.0,
        "replay/age/mean": 2.5,
        "replay/age/max": 4.0,
    }
    assert replay_metrics([], policy_version=5) == {"replay/num_rollouts": 0.0}


def test_ratio_metrics_look_at_trained_tokens_only() -> None:
    metrics = ratio_metrics([datum(mask=(False, True, True), logprobs=(0.0, -1.0, -2.0))], [(9.0, -1.5, -2.25)])

    assert metrics["replay/log_ratio/mean"] == pytest.approx(0.375)
    assert metrics["replay/log_ratio/max"] == pytest.approx(0.5)
    assert ratio_metrics([], []) == {}
