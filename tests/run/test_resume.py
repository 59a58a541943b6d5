"""What a resumed run keeps of the groups that an earlier attempt left."""

from dataclasses import replace

from cua_rl.database.progress import Progress
from cua_rl.rl.config import SamplingSettings
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.run.resume import plan_start
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.rollout import StopReason
from tests.builders import group, rollout


def test_a_group_that_lost_too_many_members_is_not_trained_after_a_resume_either() -> None:
    survivors = [rollout(reward=1.0, rollout_id="a"), rollout(reward=0.0, rollout_id="b", member_index=1)]
    lost = rollout(reward=None, rollout_id="c", stop_reason=StopReason.DEVICE_ERROR, member_index=2)
    progress = Progress(
        done_indices=(),
        untrained=((group(*survivors, faulty=[lost]), 2),),
        newest_steps={0: 0},
        evaluated=frozenset(),
    )

    kept = [
        plan_start(CLIConfig(max_steps_off_policy=2, sampling=SamplingSettings(min_group_size=least)), progress, 1)
        .kept_groups[0]
        .scored.group
        for least in (2, 3)
    ]

    assert [entry.is_constant for entry in kept] == [False, True]


def test_a_group_that_began_with_fewer_members_than_usual_lost_none() -> None:
    """Its parent ended before its fork turn, so that it has no siblings."""
    members = [rollout(reward=float(number == 0), rollout_id=f"r{number}", member_index=number) for number in range(3)]
    progress = Progress(done_indices=(), untrained=((group(*members), 2),), newest_steps={0: 0}, evaluated=frozenset())
    config = CLIConfig(max_steps_off_policy=2, sampling=SamplingSettings(min_group_size=4))

    (kept,) = plan_start(config, progress, 1).kept_groups

    assert kept.scored.has_signal


def test_a_synchronous_run_keeps_whole_groups_whose_parent_ended_before_its_fork_turn() -> None:
    begun = [rollout(reward=float(place == 0), rollout_id=f"r{place}", member_index=place) for place in range(4)]
    siblings = [
        replace(rollout(reward=0.0, rollout_id=f"s{place}", member_index=place), parent_id="r3", fork_turn=1)
        for place in (4, 5)
    ]
    lost = rollout(reward=None, rollout_id="lost", stop_reason=StopReason.DEVICE_ERROR, member_index=5)
    lost = replace(lost, parent_id="r3", fork_turn=1)
    groups = [
        group(*begun),
        group(*begun, *siblings),
        group(*begun, siblings[0], faulty=[lost]),
        group(*begun[:3], faulty=[replace(lost, member_index=3)]),
        group(*begun, *(replace(one, parent_id=None, fork_turn=0) for one in siblings)),  # of a run without branches
    ]
    untrained = tuple((replace(one, group_id=str(place), index=place), 2) for place, one in enumerate(groups))
    progress = Progress(done_indices=(), untrained=untrained, newest_steps={0: 0}, evaluated=frozenset())
    config = CLIConfig(advantages="leave_one_out", group_size=6, branching=BranchingSettings(num_siblings=2))

    kept = plan_start(config, progress, 1).kept_groups

    assert [waiting.scored.group.group_id for waiting in kept] == ["0", "1"]
