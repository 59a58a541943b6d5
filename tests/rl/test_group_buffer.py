from random import Random

import pytest

from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.group_buffer import GroupBuffer, WaitingGroup, fitting
from cua_rl.types.rollout import RolloutGroup
from tests import builders


def make_group(index: int) -> ScoredGroup:
    rollouts = tuple(builders.rollout(reward=reward, rollout_id=f"{index}-{reward}") for reward in (0.0, 1.0))
    group = RolloutGroup(group_id=f"g{index}", index=index, task_id="task", seed=1, rollouts=rollouts)
    return score_group(group, "mean")


def test_admission_is_arithmetic() -> None:
    buffer = GroupBuffer(groups_per_batch=2, max_lag=1, max_steps=3)

    places = [buffer.start() for _ in range(4)]  # (0 + 1 + 1) * 2

    assert [place.last_step for place in places] == [2] * 4
    assert not buffer.may_start
    buffer.announce(1)
    assert [buffer.start().last_step for _ in range(2)] == [3, 3]
    assert not buffer.may_start  # three steps of two groups are all there is


def test_the_first_to_finish_are_the_first_batch_as_long_as_nobody_comes_too_late() -> None:
    buffer = GroupBuffer(groups_per_batch=2, max_lag=1, max_steps=9)
    slow, other, quick, quickest = [buffer.start() for _ in range(4)]

    buffer.finish(quickest, make_group(quickest.ordinal))
    buffer.finish(quick, make_group(quick.ordinal))

    batch = buffer.take_batch()
    assert batch is not None
    assert [scored.group.index for scored in batch] == [2, 3]
    buffer.announce(1)
    late = [buffer.start() for _ in range(2)]
    for place in (*late, other):
        buffer.finish(place, make_group(place.ordinal))
    assert buffer.take_batch() is None  # step 2 is the last one for `slow`, so it waits for it
    buffer.finish(slow, make_group(slow.ordinal))
    batch = buffer.take_batch()
    assert batch is not None
    assert [scored.group.index for scored in batch] == [0, 1]


@pytest.mark.parametrize("max_lag", [1, 2, 3, 4])
def test_whatever_finishes_in_whatever_order_nothing_is_late_and_nothing_is_stuck(max_lag: int) -> None:
    for seed in range(30):
        random = Random(seed)
        buffer = GroupBuffer(groups_per_batch=random.randrange(1, 5), max_lag=max_lag, max_steps=12)
        running = []
        started_at: dict[int, int] = {}  # by ordinal: the policy that was announced
        trained: list[int] = []
        announced = 0
        while not buffer.is_complete:
            moves = ["start"] * 3 * buffer.may_start + ["finish"] * bool(running) + ["announce"]
            move = random.choice(moves)
            if move == "start":
                running.append(buffer.start())
                started_at[running[-1].ordinal] = announced
            elif move == "finish":
                place = running.pop(random.randrange(len(running)))
                buffer.finish(place, make_group(place.ordinal))
            elif announced < buffer.next_step - 1:
                announced += 1
                buffer.announce(announced)
            elif not buffer.may_start and not running:
                assert len(buffer.waiting) >= buffer.groups_per_batch  # a batch exists: not stuck
            step = buffer.next_step
            if (batch := buffer.take_batch()) is not None:
                ordinals = [scored.group.index for scored in batch]
                assert all(step - 1 - started_at[ordinal] <= max_lag for ordinal in ordinals)
                trained += ordinals
            elif not running and not buffer.may_start and announced == buffer.next_step - 1:
                raise AssertionError(f"stuck at step {step}, seed {seed}")
        assert sorted(trained) == list(range(12 * buffer.groups_per_batch))


def test_ordinals_that_an_earlier_attempt_left_open_start_again_first() -> None:
    buffer = GroupBuffer(groups_per_batch=2, max_lag=2, max_steps=5, next_step=2, announced_step=1)

    buffer.restore(done={0, 3}, kept=[WaitingGroup(scored=make_group(4), last_step=4)])

    assert [buffer.start().ordinal for _ in range(4)] == [1, 2, 5, 6]
    assert buffer.num_waiting == 1


def test_with_smaller_batches_the_groups_that_would_come_too_late_are_not_kept() -> None:
    groups = [WaitingGroup(scored=make_group(index), last_step=last) for index, last in enumerate([5, 4, 4, 4, 5])]

    assert len(fitting(groups, next_step=4, groups_per_batch=4)) == 5
    # one a step: step 4 takes one of those it may still take, step 5 one more
    assert [waiting.scored.group.index for waiting in fitting(groups, next_step=4, groups_per_batch=1)] == [1, 0]
