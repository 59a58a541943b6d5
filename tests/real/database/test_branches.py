from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.rebuild import load_advantages, load_groups
from cua_rl.events import GroupEnded, RolloutSource
from cua_rl.exchange.records import load_rollout_records, load_run
from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.datums import build_batch, datums_sha256
from cua_rl.supervised.recorded import load_successes
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


async def record_success_of_sibling(url: str) -> RolloutGroup:
    """A recorded group whose only success went on from a turn of a rollout that failed."""
    group = grown_group()
    rollouts = [
        replace(one, validation=one.validation and replace(one.validation, success=one.parent_id is not None))
        for one in group.rollouts
    ]
    group = replace(group, rollouts=tuple(rollouts), faulty=())
    scored = score_group(group, "leave_one_out")
    *events, _ = source_events(group)
    ended = GroupEnded(source=RolloutSource(phase="step", step=1), group=group, advantages=scored.advantages)
    await record(url, start(), *events, ended)
    return group


async def test_a_success_teaches_its_parents_turns_too_if_nobody_else_does(url: str, session: AsyncSession) -> None:
    group = await record_success_of_sibling(url)
    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))

    found = await load_successes(session, training_id, num_steps=None, max_per_task=None, seed=0)

    (taught,) = found.rollouts
    assert (taught.parent_id is not None, taught.fork_turn) == (True, 0)
    assert taught.turns == group.rollouts[-1].turns


@pytest.mark.parametrize("is_pruned", [False, True])
async def test_siblings_of_a_pruned_parent_are_not_exported_as_whole_rollouts(
    url: str, session: AsyncSession, is_pruned: bool
) -> None:
    group = await record_success_of_sibling(url)
    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    parent_id = group.rollouts[-1].parent_id
    if is_pruned:
        run_sql(url, f"UPDATE rollouts SET pruned_at = now() WHERE rollout_id = '{parent_id}'")
    (source,) = (await load_run(session, training_id)).sources

    (records,) = [found async for found in load_rollout_records(session, training_id, source)]

    exported = [record.rollout.rollout_id for record in records]
    expected = [one.rollout_id for one in group.rollouts]
    assert exported == [one for one in expected if not is_pruned or one not in (parent_id, expected[-1])]
