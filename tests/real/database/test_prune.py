"""Pruning: what goes, what stays, what the rest of the system says about it, and that it is safe beside a recorder."""

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.prune import Keep, choose_rollouts, prune_rollouts, prune_unused, shrink
from cua_rl.database.rebuild import load_advantages, load_groups, load_rollouts
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.session import make_writer_engine
from cua_rl.database.writer import TimedEvent, write_events
from cua_rl.events import CheckpointSaved, Event, TrainingEnded
from cua_rl.exchange.records import load_rollout_records, load_run
from cua_rl.recipes.prune import PruneConfig, cli_main
from cua_rl.rl.advantages import ScoredGroup
from cua_rl.rl.config import CurriculumSettings
from cua_rl.rl.curriculum import Memory
from cua_rl.rl.datums import build_batch, datums_sha256
from cua_rl.run.resume import OUTCOMES_NAME, load_memory
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.log_directory import prepare_log_directory
from cua_rl.supervised.recorded import load_successes
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import ImageChunk, ModelInput, Rollout, RolloutGroup, Turn
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, draw, make_group, source_events, start, step_end
from tests.real.database.test_recorder import record

STORED = "SELECT count(*) FROM screenshots WHERE data IS NOT NULL"
REMOVED = "SELECT count(*) FROM screenshots WHERE removed_at IS NOT NULL"
ENDED = TrainingEnded(status="completed")


@contextmanager
def connecting(url: str) -> Generator[Connection]:
    """A transaction."""
    engine = make_writer_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def keys_of(connection: Connection, training_id: int) -> Sequence[int]:
    """All rollouts of a run that may be pruned."""
    chosen = choose_rollouts(training_id, keep="none", ended_before=None, before_step=None, is_deleting=False)
    return connection.scalars(chosen).all()


def images_of(rollouts: Sequence[Rollout]) -> set[str]:
    """Hashes of all images that rollouts show."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    shown = [image for turn in turns for image in (*turn.model.prompt.images, turn.agent.before, turn.agent.after)]
    return {image.sha256 for image in shown if image is not None}


def successes_of(groups: Sequence[RolloutGroup], *, success: bool) -> list[Rollout]:
    """Rollouts with or without success, faults among those without."""
    return [one for group in groups for one in (*group.rollouts, *group.faulty) if one.success is success]


async def prune(url: str, run: str | None = "run", **settings: object) -> None:
    config = PruneConfig(run=run, **{"dry_run": False, **settings})  # pyright: ignore[reportArgumentType]
    await cli_main(config, {"DATABASE_URL": url})


async def record_steps(url: str, *more: Event) -> list[RolloutGroup]:
    """Two trained steps; returns their groups."""
    groups = [make_group(1, "first"), make_group(2, "second")]
    events = [
        event for step, group in enumerate(groups, 1) for event in (*source_events(group, step), step_end(group, step))
    ]
    await record(url, start(), *events, *more)
    return groups


async def test_a_dry_run_says_what_pruning_then_removes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = await record_steps(url, ENDED)
    gone = images_of(successes_of(groups, success=True)) - images_of(successes_of(groups, success=False))
    sizes = {str(sha): size for sha, size in run_sql(url, "SELECT sha256, octet_length(data) FROM screenshots")}

    await prune(url, dry_run=True)
    said = capsys.readouterr().out
    assert run_sql(url, REMOVED) == [(0,)]
    await prune(url)
    done = capsys.readouterr().out

    counted = f"{len(gone)} screenshots ({sum(int(str(sizes[sha])) for sha in gone) / 1e6:,.1f} MB)"
    assert said.startswith(f"would remove {counted}; {len(successes_of(groups, success=True))} rollouts lose theirs\n")
    assert f"\nremoved {counted}" in f"\n{done}"
    left = run_sql(url, "SELECT sha256 FROM screenshots WHERE data IS NOT NULL AND removed_at IS NULL")
    assert {sha for (sha,) in left} == sizes.keys() - gone
    named = run_sql(url, "SELECT before_sha256, after_sha256 FROM turns")  # what turns name keeps its size
    without = run_sql(url, "SELECT sha256, size_bytes FROM screenshots WHERE data IS NULL AND removed_at IS NOT NULL")
    assert dict(without) == {sha: sizes[sha] for sha in gone & {sha for pair in named for sha in pair}}
    await prune(url)
    assert "removed 0 screenshots (0.0 MB); 0 rollouts" in capsys.readouterr().out


@pytest.mark.parametrize("keep", ["failures", "successes", "none"])
async def test_what_is_kept_is_rebuilt_bit_for_bit_and_the_rest_without_pixels(
    url: str, session: AsyncSession, keep: Keep
) -> None:
    groups = await record_steps(url, ENDED)

    await prune(url, keep=keep)

    kept = [] if keep == "none" else successes_of(groups, success=keep == "successes")
    rebuilt = [group for step in (1, 2) for group in await load_groups(session, 1, step)]
    whole = {one.rollout_id: one for group in groups for one in (*group.rollouts, *group.faulty)}
    assert await load_rollouts(session, 1, list(whole)) == kept
    for rollout in (one for group in rebuilt for one in (*group.rollouts, *group.faulty)):
        recorded = whole[rollout.rollout_id]
        assert replace(rollout, turns=()) == replace(recorded, turns=())
        assert images_of([rollout]) == images_of([recorded])
        for turn, before in zip(rollout.turns, recorded.turns, strict=True):
            assert replace(turn.model, prompt=before.model.prompt) == before.model
            assert replace(turn.agent, before=None, after=None) == replace(before.agent, before=None, after=None)


async def test_the_datums_of_a_pruned_step_have_their_fingerprint(url: str, session: AsyncSession) -> None:
    (group, _) = await record_steps(url, ENDED)

    async def fingerprint(groups: Sequence[RolloutGroup]) -> str:
        ((of_rollouts, of_turns),) = await load_advantages(session, 1, 1)
        scored = [ScoredGroup(group=one, advantages=of_rollouts, turn_advantages=of_turns) for one in groups]
        return datums_sha256(build_batch(scored, IMAGE_TOKEN).datums)

    await prune(url, keep="none")

    rebuilt = await load_groups(session, 1, 1)
    assert all(not image.data for one in rebuilt[0].rollouts for image in one.turns[0].model.prompt.images)
    assert await fingerprint(rebuilt) == await fingerprint([group])


async def test_a_data_set_leaves_pruned_rollouts_out_and_claims_no_fingerprint(url: str, session: AsyncSession) -> None:
    groups = await record_steps(url, ENDED)
    await prune(url)

    run = await load_run(session, 1)
    exported = [
        record.rollout
        for source in run.sources
        async for records in load_rollout_records(session, 1, source)
        for record in records
    ]

    assert exported == successes_of(groups, success=False)
    for source, group in zip(run.sources, groups, strict=True):
        is_whole = not successes_of([group], success=True)
        assert (source.datums_sha256 is not None) == is_whole


async def test_imitation_and_resuming_leave_pruned_successes_out(
    url: str, session: AsyncSession, tmp_path: Path
) -> None:
    await record_steps(url)
    config = CLIConfig(curriculum=CurriculumSettings(replay_successes=True))
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        for step, seed in enumerate((1, 2), 1):
            await Memory(outcomes_path=folder.path / OUTCOMES_NAME).remember(step, [make_group(seed)])
        async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(start(first_step=3))
            before = await load_memory(config, folder, 2, recorder, url)
            run_sql(url, "UPDATE rollouts SET pruned_at = now() WHERE success")
            after = await load_memory(config, folder, 2, recorder, url)

    assert (before.replay.num_stored, after.replay.num_stored) == (2, 0)
    with pytest.raises(ConfigError, match="at least one successful rollout of a training step that is not pruned"):
        await load_successes(session, 1, num_steps=None, max_per_task=None, seed=0)


async def test_rollouts_are_deleted_on_demand_and_their_images_with_them(url: str) -> None:
    groups = await record_steps(url, ENDED)

    await prune(url, rollouts="delete")

    left = successes_of(groups, success=False)
    assert {one for (one,) in run_sql(url, "SELECT rollout_id FROM rollouts")} == {one.rollout_id for one in left}
    assert {one for (one,) in run_sql(url, "SELECT sha256 FROM screenshots")} == images_of(left)
    fingerprints = run_sql(url, "SELECT datums_sha256 IS NULL FROM steps ORDER BY step")
    assert fingerprints == [(any(one.success for one in group.rollouts),) for group in groups]
    assert run_sql(url, "SELECT count(*) FROM groups") == [(2,)]


async def test_choices_by_step_age_and_people(url: str) -> None:
    groups = await record_steps(url, ENDED)
    judged, noted, *_ = groups[0].rollouts
    run_sql(
        url,
        "INSERT INTO notes (training_id, rollout_pk, tag, actor) "
        f"SELECT training_id, id, 'show this', 'me' FROM rollouts WHERE rollout_id = '{noted.rollout_id}'",
    )
    run_sql(
        url,
        "INSERT INTO rollout_overrides (rollout_pk, reason, actor) "
        f"SELECT id, 'seen', 'me' FROM rollouts WHERE rollout_id = '{judged.rollout_id}'",
    )
    pruned = "SELECT rollout_id FROM rollouts WHERE pruned_at IS NOT NULL"

    await prune(url, keep="none", before_step=1)
    await prune(url, keep="none", older_than_days=1e5)
    assert run_sql(url, pruned) == []
    await prune(url, keep="none", before_step=2, older_than_days=1.0)

    first = {one.rollout_id for one in (*groups[0].rollouts, *groups[0].faulty)}
    assert {one for (one,) in run_sql(url, pruned)} == first - {judged.rollout_id, noted.rollout_id}


async def test_what_a_resumed_run_may_train_on_stays(url: str) -> None:
    waiting = source_events(make_group(3, "third"), 3)
    await record_steps(url, CheckpointSaved(step=1, state_path="/1", sampler_path="/1"), *waiting)

    await prune(url, keep="none")

    steps = "SELECT DISTINCT step FROM rollouts JOIN groups ON groups.id = group_pk JOIN steps ON steps.id = step_id"
    assert run_sql(url, f"{steps} WHERE pruned_at IS NOT NULL") == [(1,)]
    with pytest.raises(ConfigError, match="rollouts: expected a run that has ended, got 'run', which is in progress"):
        await prune(url, rollouts="delete")


async def test_images_that_others_show_stay_and_one_that_is_recorded_again_returns(
    url: str, session: AsyncSession
) -> None:
    groups = await record_steps(url, ENDED)
    again = replace(start(), run_name="other", log_path="/logs/other")
    await record(url, again, *source_events(groups[0]), step_end(groups[0]), ENDED)

    await prune(url, keep="none")

    other = images_of([*groups[0].rollouts, *groups[0].faulty])
    assert {sha for (sha,) in run_sql(url, "SELECT sha256 FROM screenshots WHERE data IS NOT NULL")} == other
    await record(url, replace(again, run_name="third"), *source_events(groups[1]), step_end(groups[1]))
    assert run_sql(url, REMOVED) == [(0,)]
    assert await load_groups(session, 3, 1) == [groups[1]]


async def test_images_of_deleted_runs_go_once_they_are_an_hour_old(url: str) -> None:
    await record_steps(url, ENDED)
    run_sql(url, "DELETE FROM trainings")

    await prune(url, run=None)
    assert run_sql(url, STORED) != [(0,)]
    run_sql(url, "UPDATE screenshots SET created_at = created_at - interval '2 hours'")
    await prune(url, run=None)

    assert run_sql(url, "SELECT count(*) FROM screenshots") == [(0,)]


async def test_an_image_that_a_transaction_is_about_to_show_is_left_alone(url: str) -> None:
    """The recorder has looked the image up, and commits after the pruning."""
    (group, _) = await record_steps(url, ENDED)
    again = replace(start(), run_name="other", log_path="/logs/other")
    events = [TimedEvent(event=one, at=datetime.now(UTC)) for one in (again, *source_events(group))]

    with connecting(url) as recording:
        write_events(recording, Scope(image_token_id=IMAGE_TOKEN), events)
        with connecting(url) as pruning:
            prune_rollouts(pruning, keys_of(pruning, training_id=1), is_deleting=False)

    shown = {sha for (sha,) in run_sql(url, "SELECT sha256 FROM screenshots WHERE data IS NOT NULL")}
    assert shown == images_of([*group.rollouts, *group.faulty])


async def test_an_image_that_is_being_removed_is_sent_again(url: str, session: AsyncSession) -> None:
    """The recorder waits for the removal, and then finds that the image is missing."""
    (group, _) = await record_steps(url, ENDED)
    again = replace(start(), run_name="other", log_path="/logs/other")
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = 'test'"

    with connecting(url) as pruning:
        prune_rollouts(pruning, keys_of(pruning, training_id=1), is_deleting=False)
        recording = asyncio.create_task(record(url, again, *source_events(group), step_end(group)))
        while run_sql(url, blocked) == [(0,)]:
            await asyncio.sleep(0.01)
    await recording

    assert await load_groups(session, 2, 1) == [group]


async def test_pruning_beside_a_recorder_loses_nothing_that_is_shown(url: str, session: AsyncSession) -> None:
    """Runs share most of their screens; each is recorded while those before it are pruned again and again."""
    screens = [draw("png", 40, 40, bytes([number, 9, 9])) for number in range(30)]
    is_over = threading.Event()

    def prune_until_then() -> int:
        num_removed = 0
        while not is_over.is_set():
            for training_id in range(1, 31):
                with connecting(url) as connection:
                    keys = keys_of(connection, training_id)
                    num_removed += prune_rollouts(connection, keys, is_deleting=False)[0]
        return num_removed

    pruning = asyncio.create_task(asyncio.to_thread(prune_until_then))
    groups: list[RolloutGroup] = []
    try:
        for number in range(30):
            groups.append(with_screens(make_group(number, "group"), screens[number % 20 : number % 20 + 10]))
            begin = replace(start(), run_name=f"run {number}", log_path=f"/logs/{number}")
            ends = [ENDED] if number < 29 else []  # the last one may go on, so that it is not pruned
            await record(url, begin, *source_events(groups[-1]), step_end(groups[-1]), *ends)
    finally:
        is_over.set()
        num_removed = await pruning

    assert num_removed > 0
    assert await load_groups(session, 30, 1) == [groups[-1]]


def with_screens(group: RolloutGroup, screens: Sequence[EncodedImage]) -> RolloutGroup:
    """The group on other screens."""

    def other(image: EncodedImage | None) -> EncodedImage | None:
        return None if image is None else screens[int(image.sha256, 16) % len(screens)]

    def on_screens(turn: Turn) -> Turn:
        chunks = tuple(
            replace(chunk, image=other(chunk.image)) if isinstance(chunk, ImageChunk) else chunk
            for chunk in turn.model.prompt.chunks
        )
        agent = replace(turn.agent, before=other(turn.agent.before), after=other(turn.agent.after))
        return replace(turn, model=replace(turn.model, prompt=ModelInput(chunks=chunks)), agent=agent)

    def rollouts_of(members: Sequence[Rollout]) -> tuple[Rollout, ...]:
        return tuple(replace(one, turns=tuple(map(on_screens, one.turns))) for one in members)

    return replace(group, rollouts=rollouts_of(group.rollouts), faulty=rollouts_of(group.faulty))


async def test_space_is_returned_on_demand(url: str) -> None:
    engine = make_writer_engine(url)
    run_sql(
        url,
        "INSERT INTO screenshots (sha256, data, format, width_px, height_px, created_at) SELECT md5(n::text), "
        "string_agg(sha256((n || ':' || m)::bytea), ''), 'png', 8, 8, now() - interval '1 day' "
        "FROM generate_series(1, 400) n, generate_series(1, 1000) m GROUP BY n",
    )
    try:
        num_images, num_bytes = 0, 0
        for number, size in prune_unused(engine):
            num_images, num_bytes = num_images + number, num_bytes + size
        assert (num_images, num_bytes) == (400, 400 * 32_000)
        assert shrink(engine) >= num_bytes
    finally:
        engine.dispose()


async def test_an_embedded_database_of_a_finished_run_is_found_by_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run: expected the folder of a run with its own database"):
        await cli_main(PruneConfig(run=str(tmp_path)), {})
    with pytest.raises(ConfigError, match="run: expected a run, or DATABASE_URL to be set"):
        await cli_main(PruneConfig(), {})
