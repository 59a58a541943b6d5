from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.rebuild import load_advantages, load_groups, load_rollouts
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import Event, GroupEnded, RolloutSource
from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.config import AdvantageKind, CurriculumSettings
from cua_rl.rl.curriculum import Memory, SuccessRates, build_outcome, first_success
from cua_rl.rl.datums import build_batch, datums_sha256
from cua_rl.run.resume import OUTCOMES_NAME, load_memory
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.log_directory import prepare_log_directory
from cua_rl.types.errors import DatabaseError
from cua_rl.types.rollout import RolloutGroup
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
    started = source_events(replace(group, replayed=()), step=2)[:-1]
    ended = GroupEnded(
        source=RolloutSource(phase="step", step=2), group=group, advantages=advantages, replaced_by=make_task(seed=8)
    )
    return [*started, ended, ended]


async def test_a_replayed_rollout_is_stored_once_and_its_group_is_rebuilt_with_it(
    url: str, session: AsyncSession
) -> None:
    group = failed_group()

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *second_step(group))

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    assert await load_groups(session, training_id, 2) == [group]
    assert await load_groups(session, training_id, 1) == [EARLIER]
    assert [one for one, _ in await load_advantages(session, training_id, 2)] == [(0.0, 1 / 3, 2 / 3, 1.0)]
    assert run_sql(url, "SELECT count(*) FROM replays") == [(1,)]
    copies = f"SELECT count(*) FROM rollouts WHERE rollout_id = '{EARLIER.rollouts[0].rollout_id}'"
    assert run_sql(url, copies) == [(1,)]


@pytest.mark.parametrize("kind", ["mean_std", "state_groups"])
async def test_the_datums_of_a_step_with_a_replay_are_rebuilt_bit_for_bit(
    url: str, session: AsyncSession, kind: AdvantageKind
) -> None:
    group = failed_group()
    scored = score_group(group, kind)
    batch = build_batch([scored], IMAGE_TOKEN)
    assert any(len(set(own)) > 1 for own in scored.turn_advantages) == (kind == "state_groups")
    events = second_step(group)[:-2]
    ended = GroupEnded(
        source=RolloutSource(phase="step", step=2),
        group=group,
        advantages=scored.advantages,
        turn_advantages=scored.turn_advantages,
    )

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *events, ended)

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    groups, loaded = await load_groups(session, training_id, 2), await load_advantages(session, training_id, 2)
    rebuilt = [
        ScoredGroup(group=one, advantages=of_rollouts, turn_advantages=of_turns)
        for one, (of_rollouts, of_turns) in zip(groups, loaded, strict=True)
    ]
    datums = build_batch(rebuilt, IMAGE_TOKEN).datums
    assert batch.replayed_ids == {EARLIER.rollouts[0].rollout_id}
    assert datums_sha256(datums) == datums_sha256(batch.datums)


async def test_a_group_that_is_replaced_makes_its_step_one_group_longer(url: str) -> None:
    group = failed_group()

    await record(url, start(), *source_events(EARLIER), step_end(EARLIER), *second_step(group))

    row = "SELECT num_groups, num_ended_groups, cardinality(task_pks), status FROM steps WHERE step = 2"
    assert run_sql(url, row) == [(2, 1, 2, "rollouts")]


async def test_rollouts_are_found_by_id_in_the_order_asked_for(url: str, session: AsyncSession) -> None:
    await record(url, start(), *source_events(EARLIER))
    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    wanted = [EARLIER.rollouts[2], EARLIER.rollouts[0]]

    assert await load_rollouts(session, training_id, [rollout.rollout_id for rollout in wanted]) == wanted
    assert await load_rollouts(session, training_id, []) == []
    with pytest.raises(DatabaseError, match="unknown"):
        await load_rollouts(session, training_id, ["unknown"])


async def test_a_resumed_run_remembers_what_the_first_attempt_stored(url: str, tmp_path: Path) -> None:
    config = CLIConfig(curriculum=CurriculumSettings(task_sampling="success_rate", replay_successes=True))
    success = first_success(EARLIER)
    assert success is not None
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        first = Memory(rates=SuccessRates(), outcomes_path=folder.path / OUTCOMES_NAME)
        await first.remember(1, [EARLIER])
        await first.remember(2, [failed_group()])  # after the checkpoint that the second attempt goes on from
        await record(url, start(), *source_events(EARLIER), step_end(EARLIER))

        async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(start(first_step=2))
            memory = await load_memory(config, folder, 1, recorder, url)

    failed = replace(failed_group(), replayed=())
    hopeless = replace(failed, rollouts=tuple(replace(rollout, validation=None) for rollout in failed.rollouts))
    assert memory.replay.join(hopeless).replayed == (success,)
    expected = SuccessRates()
    expected.observe([build_outcome(EARLIER)])
    assert memory.rates is not None
    assert memory.rates.metrics() == expected.metrics()


async def test_a_resumed_run_says_so_if_its_successes_are_in_another_database(url: str, tmp_path: Path) -> None:
    config = CLIConfig(curriculum=CurriculumSettings(replay_successes=True))
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        await Memory(outcomes_path=folder.path / OUTCOMES_NAME).remember(1, [EARLIER])

        async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(start(first_step=2))
            with pytest.raises(DatabaseError, match="the database that the run began with"):
                await load_memory(config, folder, 1, recorder, url)
