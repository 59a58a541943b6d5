"""Successes read back from a real database."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from alembic import command
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.migrations import alembic_config, migrate
from cua_rl.database.models import Training
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.run.prepared_sft import build_recorded_examples
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.supervised.recorded import load_successes
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, RolloutGroup
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start

GROUPS = tuple(make_group(seed, group_id=f"group-{seed}", num_rollouts=4) for seed in range(3))
HELD_OUT = make_group(9, group_id="held out", num_rollouts=4)


def successes(*groups: RolloutGroup) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if rollout.success]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run_folder(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Path]:
    """A run of three steps and an evaluation, recorded in a database of its own."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "logs").mkdir(parents=True)
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server:
        await migrate(server.url)
        async with DatabaseRecorder(server.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(start())
            for event in source_events(HELD_OUT, step=0, phase="baseline"):
                await recorder.record(event)
            for step, group in enumerate(GROUPS, start=1):
                for event in source_events(group, step=step):
                    await recorder.record(event)
    yield folder


@asynccontextmanager
async def open_run(from_run: str, environ: Mapping[str, str] | None = None) -> AsyncGenerator[tuple[AsyncSession, int]]:
    opened = open_run_database(from_run, environ or {}, "from_run")
    async with opened as (database, name), database.sessions() as session:
        yield session, await find_training_id(database, name, "from_run")


async def load(from_run: Path, num_steps: int | None = None, max_per_task: int | None = None) -> list[Rollout]:
    async with open_run(str(from_run)) as (session, training_id):
        found = await load_successes(session, training_id, num_steps=num_steps, max_per_task=max_per_task, seed=0)
        return list(found.rollouts)


async def test_successes_of_training_steps_come_back_as_they_were_and_nothing_else_does(run_folder: Path) -> None:
    expected = successes(*GROUPS)
    assert len(expected) >= 3
    assert await load(run_folder) == expected


async def test_only_the_first_steps_are_taken_if_asked_for(run_folder: Path) -> None:
    assert await load(run_folder, num_steps=2) == successes(*GROUPS[:2])


async def test_a_task_gives_at_most_as_many_as_asked_for_and_the_same_ones_every_time(run_folder: Path) -> None:
    taken = await load(run_folder, max_per_task=2)
    assert len(taken) == 2
    assert taken == await load(run_folder, max_per_task=2)
    assert {rollout.rollout_id for rollout in taken} <= {rollout.rollout_id for rollout in successes(*GROUPS)}


async def test_trained_tokens_are_literally_the_sampled_ones(run_folder: Path) -> None:
    rollouts = await load(run_folder)
    for rollout, example in zip(rollouts, build_recorded_examples(rollouts, IMAGE_TOKEN), strict=True):
        trained = [
            token
            for datum in example
            for token, is_on in zip(datum.model_input.token_ids(IMAGE_TOKEN), datum.loss_mask, strict=True)
            if is_on
        ]
        assert trained == [token for turn in rollout.turns for token in turn.model.sampled_tokens]


async def test_repeats_count_once(tmp_path: Path) -> None:
    group = GROUPS[0]
    again = [
        RolloutGroup(
            group_id="again",
            index=0,
            task_id=group.task_id,
            seed=group.seed,
            rollouts=tuple(map(_renamed, group.rollouts)),
        )
    ]
    folder = tmp_path / "run"
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server:
        await migrate(server.url)
        async with DatabaseRecorder(server.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(start())
            for step, one in enumerate((group, *again), start=1):
                for event in source_events(one, step=step):
                    await recorder.record(event)
        # the run is read while its database is in use
        async with open_run(str(folder)) as (session, training_id):
            found = await load_successes(session, training_id, num_steps=None, max_per_task=None, seed=0)
    num_successes = len(successes(group))
    assert (found.num_successes, found.num_repeats) == (2 * num_successes, num_successes)
    assert list(found.rollouts) == successes(group)


def _renamed(rollout: Rollout) -> Rollout:
    return replace(rollout, rollout_id=f"{rollout.rollout_id}-again")


async def test_a_run_is_found_in_the_database_of_the_environment_and_a_stranger_is_refused(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "postgres.log") as server:
        await migrate(server.url)
        async with DatabaseRecorder(server.url, image_token_id=IMAGE_TOKEN) as recorder:
            for event in (start(), *source_events(GROUPS[0])):
                await recorder.record(event)
        for name in ("run", "runs/run"):
            async with open_run(name, {"DATABASE_URL": server.url}) as (session, training_id):
                assert (await session.get_one(Training, training_id)).run_name == "run"
        with pytest.raises(ConfigError, match=r"from_run: expected .*, got 'rum'; the latest ones are 'run'"):
            async with open_run("rum", {"DATABASE_URL": server.url}):
                pass


async def test_a_run_that_an_older_version_recorded_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server:
        await migrate(server.url)
        async with DatabaseRecorder(server.url, image_token_id=IMAGE_TOKEN) as recorder:
            for event in (start(), *source_events(GROUPS[0])):
                await recorder.record(event)
        await asyncio.to_thread(command.downgrade, alembic_config(server.url), "0001")
    assert await load(folder) == [as_first_recorded(one) for one in successes(GROUPS[0])]


def as_first_recorded(rollout: Rollout) -> Rollout:
    """Without what later versions added."""
    assert rollout.reward is not None
    turns = tuple(
        replace(turn, state="", model=replace(turn.model, grammar=""), agent=replace(turn.agent, target_box=()))
        for turn in rollout.turns
    )
    return replace(rollout, turns=turns, reward=replace(rollout.reward, of_turns=()))


async def test_a_run_without_successes_is_refused(run_folder: Path) -> None:
    async with open_run(str(run_folder)) as (session, training_id):
        with pytest.raises(ConfigError, match="expected at least one successful rollout"):
            await load_successes(session, training_id, num_steps=0, max_per_task=None, seed=0)
