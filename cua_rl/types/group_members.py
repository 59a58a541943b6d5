"""What groups are counted by, where some rollouts go on from turns of others (`rollout/branches.py`)."""

from dataclasses import replace

from cua_rl.types.rollout import RolloutGroup


def without_siblings(group: RolloutGroup) -> RolloutGroup:
    """Without members that go on from others of the group: how many there are depends on what those do, so that a
    success rate with them is not the policy's.
    """
    ids = {rollout.rollout_id for rollout in group.rollouts}
    rollouts, faulty = (
        tuple(one for one in members if one.parent_id not in ids) for members in (group.rollouts, group.faulty)
    )
    return replace(group, rollouts=rollouts, faulty=faulty)


def has_lost_members(group: RolloutGroup, min_group_size: int) -> bool:
    """Whether fewer than so many members have a reward; a group may have begun with fewer."""
    num_begun = len({rollout.member_index for rollout in (*group.rollouts, *group.faulty)})
    return len(group.rollouts) < min(min_group_size, num_begun)
