"""Groups that start before anyone knows which step trains them, and what a resumed run keeps of them."""

from dataclasses import replace
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.progress import load_progress
from cua_rl.database.queries import find_training, load_steps
from cua_rl.database.rebuild import load_groups
from cua_rl.events import BatchTaken, CheckpointSaved, EvaluationEnded, Event, RolloutSource, SourceStarted
from cua_rl.run.resume import follow_move, load_resumed
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.earlier_attempt import Curve, EarlierAttempt
from cua_rl.run_folder.log_directory import prepare_log_directory
from cua_rl.types.rollout import RolloutGroup
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import make_group, source_events, start, step_end
from tests.real.database.test_recorder import record


def numbered(ordinal: int, policy_version: int) -> RolloutGroup:
    """A group of the run, every turn sampled by one version."""
    group = make_group(ordinal + 1, group_id=f"group {ordinal}")
    rollouts = tuple(
        replace(
            rollout,
            group_index=ordinal,
            turns=tuple(
                replace(turn, model=replace(turn.model, policy_version=policy_version)) for turn in rollout.turns
            ),
        )
        for rollout in group.rollouts
    )
    return replace(group, index=ordinal, rollouts=rollouts, faulty=())


def begun(step: int) -> SourceStarted:
    source = RolloutSource(phase="step", step=step)
    return SourceStarted(source=source, tasks=(), num_groups=1, group_size=3, policy_version=0)


def ended(group: RolloutGroup, last_step: int) -> list[Event]:
    """The group's events, as of a step that may train it."""
    return source_events(group, step=last_step)[1:]


# batches of one group, K = 1: groups 0 and 1 start under policy 0, group 2 under policy 1, group 3 under policy 2
FIRST, SECOND, THIRD, FOURTH = numbered(0, 0), numbered(1, 0), numbered(2, 1), numbered(3, 2)


def killed_run() -> list[Event]:
    return [
        start(),
        begun(2),
        *ended(SECOND, 2),
        begun(1),
        BatchTaken(step=1, group_ids=("group 1",)),
        step_end(SECOND),
        CheckpointSaved(step=1, state_path="/1", sampler_path="/1"),
        *ended(FIRST, 2),
        begun(3),
        *ended(THIRD, 3),
        BatchTaken(step=2, group_ids=("group 0",)),
        step_end(FIRST, step=2),
        begun(4),
        *ended(FOURTH, 4),
    ]


async def test_a_group_belongs_to_the_step_that_trained_it(url: str, session: AsyncSession) -> None:
    await record(url, *killed_run())

    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))
    assert await load_groups(session, training_id, 1) == [SECOND]
    assert await load_groups(session, training_id, 2) == [FIRST]
    steps = {step.step: step.status for step in await load_steps(session, training_id)}
    assert steps == {1: "completed", 2: "completed", 3: "rollouts", 4: "rollouts"}


async def test_a_resumed_run_keeps_ended_groups_of_policies_that_its_checkpoint_knows(
    url: str, session: AsyncSession
) -> None:
    await record(url, *killed_run())
    training_id = int(str(run_sql(url, "SELECT id FROM trainings")[0][0]))

    progress = await load_progress(session, training_id, 1)

    assert progress.done_indices == (1,)
    assert progress.newest_steps == {0: 0, 1: 1}
    # FIRST was trained by step 2, which is void; FOURTH was sampled by policy 2, which is void too
    assert progress.untrained == ((FIRST, 2), (THIRD, 3))
    await session.rollback()

    await record(url, replace(start(first_step=2), kept_group_ids=("group 0", "group 2")))
    assert await load_groups(session, training_id, 2) == [FIRST]
    assert await load_groups(session, training_id, 3) == [THIRD]
    rows = run_sql(url, "SELECT step, status, datums_sha256 IS NULL FROM steps ORDER BY step")
    assert rows == [(1, "completed", False), (2, "rollouts", True), (3, "rollouts", True)]

    await record(
        url,
        replace(start(first_step=2), kept_group_ids=("group 0", "group 2")),
        begun(2),
        BatchTaken(step=2, group_ids=("group 2",)),
        step_end(THIRD, step=2),
        BatchTaken(step=3, group_ids=("group 0",)),
    )
    await session.rollback()
    assert await load_groups(session, training_id, 2) == [THIRD]
    assert await load_groups(session, training_id, 3) == [FIRST]


async def test_a_baseline_that_a_killed_run_did_not_finish_is_owed(url: str, tmp_path: Path) -> None:
    baseline = RolloutSource(phase="baseline", step=0)
    begins = replace(start(), log_path=str(tmp_path))
    started = SourceStarted(source=baseline, tasks=(), num_groups=1, group_size=3, policy_version=0)
    trained = [begun(1), *ended(SECOND, 1), BatchTaken(step=1, group_ids=("group 1",)), step_end(SECOND)]
    for step in (0, 1):
        (tmp_path / "sampler_weights" / f"{step:06d}").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    config, curve = CLIConfig(max_steps_off_policy=2, max_steps=4), Curve(number=1, after_step=0)

    with prepare_log_directory(tmp_path, "resume") as folder:
        await record(url, begins, started, *trained)
        owed = (await load_resumed(config, folder, "run", 1, url, curve)).owed_evaluations
        await record(url, replace(begins, first_step=2), started, EvaluationEnded(source=baseline, metrics={}))
        owed_later = (await load_resumed(config, folder, "run", 1, url, curve)).owed_evaluations
        await record(url, replace(begins, first_step=2), begun(2), *ended(THIRD, 2))
        kept = await load_resumed(config, folder, "run", 1, url, curve)
        with_other_tasks = await load_resumed(config, folder, "run", 1, url, Curve(number=2, after_step=1))

    assert [(one.phase, one.step, one.adapter.path.name) for one in owed] == [("baseline", 0, "000000")]
    assert owed_later == ()
    assert (kept.kept_group_ids, with_other_tasks.kept_group_ids) == (("group 2",), ())


async def test_a_run_in_a_shared_database_keeps_its_name_when_its_folder_moves_and_a_copy_begins_anew(
    url: str, session: AsyncSession, tmp_path: Path
) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    await record(url, replace(start(), run_name="before", log_path=str(folder)))
    settings = {"run_name": "before", "log_path": str(folder)}
    attempt = EarlierAttempt(path=tmp_path / "after", settings=settings, changed=(), checkpoint=None, last_step=0)

    await follow_move(attempt, "after", url, is_own=False)  # the folder is still there: this is a copy
    assert await find_training(session, "after", str(tmp_path / "after")) is None
    folder.rmdir()
    await follow_move(attempt, "after", url, is_own=False)
    await session.rollback()
    moved = await find_training(session, "after", str(tmp_path / "after"))

    assert moved is not None
    assert await find_training(session, "before", str(folder)) is None
