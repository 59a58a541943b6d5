from dataclasses import replace
from random import Random
from statistics import fmean

from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.rebuild import load_advantages, load_groups
from cua_rl.events import GroupEnded, RolloutSource
from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.datums import build_batch, datums_sha256
from cua_rl.types.rollout import RolloutGroup
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, make_rollout, source_events, start
from tests.real.database.test_recorder import record


def grown_group() -> RolloutGroup:
    """A group whose last rollout has a sibling, which shares all of its turns but the last, and a faulty one."""
    group = make_group(3)
    parent = next(one for one in group.rollouts if len(one.turns) > 1)
    fork_turn = len(parent.turns) - 1
    alone = make_rollout(Random(8), 3)
    own = tuple(
        replace(turn, index=fork_turn + number) for number, turn in enumerate((*alone.turns, *parent.turns[fork_turn:]))
    )
    sibling = replace(alone, turns=(*parent.turns[:fork_turn], *own), parent_id=parent.rollout_id, fork_turn=fork_turn)
    lost = replace(group.faulty[0], parent_id=parent.rollout_id, fork_turn=fork_turn)
    return replace(group, rollouts=(*group.rollouts, sibling), faulty=(lost,))


async def test_a_tree_is_a_tree_in_the_database_and_its_datums_are_rebuilt_bit_for_bit(
    url: str, session: AsyncSession
) -> None:
    group = grown_group()
    scored = score_group(group, "leave_one_out")
    batch = build_batch([scored], IMAGE_TOKEN)
    *events, _ = source_events(group)
    ended = GroupEnded(
        source=RolloutSource(phase="step", step=1),
        group=group,
        advantages=scored.advantages,
        turn_advantages=scored.turn_advantages,
    )

    await record(url, start(), *events, ended)

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    (loaded,) = await load_groups(session, training_id, 1)
    ((of_rollouts, of_turns),) = await load_advantages(session, training_id, 1)
    rebuilt = build_batch([ScoredGroup(group=loaded, advantages=of_rollouts, turn_advantages=of_turns)], IMAGE_TOKEN)
    assert loaded == group
    assert datums_sha256(rebuilt.datums) == datums_sha256(batch.datums)
    assert rebuilt.num_rollouts == batch.num_rollouts == 3
    assert [one.member for one in rebuilt.datums] == [one.member for one in batch.datums]
    tree = (
        "SELECT count(*) FROM rollouts AS child JOIN rollouts AS parent ON parent.rollout_id = child.parent_id "
        "AND parent.group_pk = child.group_pk WHERE child.fork_turn > 0"
    )
    assert run_sql(url, tree) == [(2,)]
    begun = group.rollouts[:3]
    figures = "SELECT num_rollouts, num_successes, num_faulty, reward_mean FROM groups"
    mean = fmean(one.reward.total for one in begun if one.reward is not None)
    assert run_sql(url, figures) == [(3, sum(one.success for one in begun), 1, mean)]
