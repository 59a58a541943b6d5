from dataclasses import replace

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.rebuild import load_advantages, load_groups, load_rollouts
from cua_rl.errors import DatabaseError
from cua_rl.events import Event, GroupEnded, Source
from cua_rl.rl.batch import build_batch, build_datums_of_groups
from cua_rl.rl.datums import datums_sha256
from cua_rl.types import RolloutGroup
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, make_task, source_events, start, step_end
from tests.real.database.test_recorder import record

EARLIER = make_group(1)


def failed_group() -> RolloutGroup:
    """Three members without reward, joined by the first rollout of an earlier step's group."""
    group = make_group(2, group_id="failed")
    worthless = tuple(
        replace(rollout, reward=replace(rollout.reward, total=0.0)) for rollout in group.rollouts if rollout.reward
    )
    return replace(group, rollouts=worthless, replayed=(EARLIER.rollouts[0],))


def second_step(group: RolloutGroup) -> list[Event]:
    """The step's events, its group's end reported twice, as after a commit whose answer was lost."""
    advantages = tuple(float(index) / 3 for index in range(len(group.compared)))
    started = source_events(replace(group, replayed=()), step=1)[:-1]
    ended = GroupEnded(
        source=Source(phase="step", step=1), group=group, advantages=advantages, replaced_by=make_task(seed=8)
    )
    return [*started, ended, ended]


async def test_a_replayed_rollout_is_stored_once_and_its_group_is_rebuilt_with_it(
    url: str, session: AsyncSession
) -> None:
    group = failed_group()

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *second_step(group))

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    assert await load_groups(session, training_id, 1) == [group]
    assert await load_groups(session, training_id, 0) == [EARLIER]
    assert await load_advantages(session, training_id, 1) == [(0.0, 1 / 3, 2 / 3, 1.0)]
    assert run_sql(url, "SELECT count(*) FROM replays") == [(1,)]
    copies = f"SELECT count(*) FROM rollouts WHERE rollout_id = '{EARLIER.rollouts[0].rollout_id}'"
    assert run_sql(url, copies) == [(1,)]


async def test_the_datums_of_a_step_with_a_replay_are_rebuilt_bit_for_bit(url: str, session: AsyncSession) -> None:
    group = failed_group()
    batch = build_batch([group], "mean_std", IMAGE_TOKEN)
    advantages = {datum.rollout_id: max(datum.advantages, key=abs) for datum in batch.datums}
    events = second_step(group)[:-2]
    ended = GroupEnded(
        source=Source(phase="step", step=1),
        group=group,
        advantages=tuple(advantages[rollout.rollout_id] for rollout in group.compared),
    )

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *events, ended)

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    groups, loaded = await load_groups(session, training_id, 1), await load_advantages(session, training_id, 1)
    datums, _ = build_datums_of_groups(groups, loaded, IMAGE_TOKEN)
    assert batch.replayed_ids == {EARLIER.rollouts[0].rollout_id}
    assert datums_sha256(datums) == datums_sha256(batch.datums)


async def test_a_group_that_is_replaced_makes_its_step_one_group_longer(url: str) -> None:
    group = failed_group()

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *second_step(group))

    row = "SELECT num_groups, num_ended_groups, cardinality(task_pks), status FROM steps WHERE step = 1"
    assert run_sql(url, row) == [(2, 1, 2, "rollouts")]


async def test_rollouts_are_found_by_id_in_the_order_asked_for(url: str, session: AsyncSession) -> None:
    await record(url, start(), *source_events(EARLIER))
    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    wanted = [EARLIER.rollouts[2], EARLIER.rollouts[0]]

    assert await load_rollouts(session, training_id, [rollout.rollout_id for rollout in wanted]) == wanted
    assert await load_rollouts(session, training_id, []) == []
    with pytest.raises(DatabaseError, match="unknown"):
        await load_rollouts(session, training_id, ["unknown"])
