import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.migrations import migrate
from cua_rl.database.models import Base, Environment, RolloutRow, Step, Training, TurnRow
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.queries import find_training, latest_trainings, load_steps
from cua_rl.database.rebuild import load_advantages, load_groups
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.session import open_sessions
from cua_rl.database.writer import TimedEvent, write_events
from cua_rl.events import (
    CheckpointSaved,
    EvaluationEnded,
    Event,
    GroupEnded,
    RolloutSource,
    SourceStarted,
    TrainingEnded,
    TurnTaken,
)
from cua_rl.types.errors import DatabaseError
from tests.patience import patience
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import (
    IMAGE_TOKEN,
    advantages_of,
    make_group,
    make_task,
    rollout_start,
    source_events,
    start,
    step_end,
    turn_advantages_of,
)

DISCONNECT_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'test' AND pid <> pg_backend_pid()
"""

OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'test' AND pid <> pg_backend_pid()"


async def record(url: str, *events: Event) -> None:
    """One attempt that reports these events and then dies or ends."""
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in events:
            await recorder.record(event)


def whole_run() -> list[Event]:
    group, held_out = make_group(1), make_group(2, group_id="held out")
    source = RolloutSource(phase="eval", step=1)
    return [
        start(),
        *source_events(group),
        step_end(group),
        CheckpointSaved(step=1, state_path="/state/1", sampler_path="/adapter/1"),
        *source_events(held_out, step=1, phase="eval"),
        EvaluationEnded(source=source, metrics={"eval/success": 0.5}),
        TrainingEnded(status="completed"),
    ]


def dump(url: str) -> dict[str, list[tuple[object, ...]]]:
    """All rows but for the columns that say when they were written."""
    tables: dict[str, list[tuple[object, ...]]] = {}
    for table in Base.metadata.sorted_tables:
        columns = [column.name for column in table.columns if column.name not in ("updated_at", "heartbeat_at")]
        order = ", ".join(column.name for column in table.primary_key)
        tables[table.name] = run_sql(url, f"SELECT {', '.join(columns)} FROM {table.name} ORDER BY {order}")
    return tables


async def test_groups_are_rebuilt_bit_for_bit(url: str, session: AsyncSession) -> None:
    group = make_group(1, num_rollouts=4)
    await record(url, start(), *source_events(group), step_end(group))

    training = await find_training(session, "run")
    assert training is not None
    rebuilt = await load_groups(session, training.id, 1)

    assert rebuilt == [group]
    assert await load_advantages(session, training.id, 1) == [(advantages_of(group), turn_advantages_of(group))]
    rollout = group.rollouts[0]
    of_rollout = select(TurnRow.turn_index, TurnRow.training_logprobs).join(RolloutRow).order_by(TurnRow.turn_index)
    stored = await session.execute(of_rollout.where(RolloutRow.rollout_id == rollout.rollout_id))
    assert [(index, logprobs) for index, logprobs in stored] == [
        (turn.index, [value - 0.1 for value in turn.model.sampling_logprobs]) for turn in rollout.turns
    ]


async def test_queries_tell_what_was_measured(url: str, session: AsyncSession) -> None:
    await record(url, *whole_run())

    [training] = await latest_trainings(session)
    assert (training.run_name, training.status, training.num_completed_steps) == ("run", "completed", 1)
    assert await find_training(session, "run", "/logs/run") == training
    assert await find_training(session, "another") is None
    [step] = await load_steps(session, training.id)
    assert (step.status, step.metrics) == ("completed", {"loss/policy": 0.1 + 0.2, "odd": float("inf")})
    assert step.datums_sha256 == f"{1:064x}"
    assert run_sql(url, "SELECT phase, step, metrics FROM evals") == [("eval", 1, {"eval/success": 0.5})]
    with pytest.raises(DatabaseError, match="expected step 3"):
        await load_groups(session, training.id, 3)


async def test_replaying_every_event_changes_nothing(url: str) -> None:
    events = whole_run()

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in events:
            await recorder.record(event)
        await recorder.flush()
        once = dump(url)
        for event in events:
            await recorder.record(event)
            await recorder.record(event)
        await recorder.flush()

        assert dump(url) == once
    assert len(once["screenshots"]) > 10
    assert len(once["tasks"]) == 1


async def test_rows_show_a_rollout_while_it_runs(url: str, session: AsyncSession) -> None:
    group = make_group(1)
    source, rollout = RolloutSource(phase="step", step=1), group.rollouts[0]

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(start())
        await recorder.record(SourceStarted(source=source, tasks=(make_task(),), group_size=3, policy_version=0))
        await recorder.record(rollout_start(source, group, rollout))
        await recorder.record(TurnTaken(rollout_id=rollout.rollout_id, turn=rollout.turns[0]))
        await recorder.flush()

        row = (await session.scalars(select(RolloutRow))).one()
        assert (row.status, row.num_turns, row.device_id) == ("running", 1, "phone-0")
        assert (await session.scalars(select(TurnRow.turn_index))).all() == [0]
        assert (await session.scalars(select(Environment.status))).all() == ["running"]
        assert (await session.scalars(select(Step.status))).all() == ["rollouts"]
        await session.rollback()

        await recorder.record(GroupEnded(source=source, group=group, advantages=advantages_of(group)))
        await recorder.flush()

    assert (await session.scalars(select(Step.status))).all() == ["training"]
    statuses = [tuple(row) for row in await session.execute(select(RolloutRow.status, RolloutRow.num_turns))]
    members = (*group.rollouts, *group.faulty)
    assert sorted(statuses) == sorted(
        ("completed" if member.reward else "failed", len(member.turns)) for member in members
    )
    history = run_sql(url, "SELECT old_status, new_status FROM status_history WHERE rollout_pk IS NOT NULL")
    assert sorted(history, key=str) == sorted(
        [(None, "running")] * 4 + [("running", "completed")] * 3 + [("running", "failed")], key=str
    )
    assert [rebuilt async for rebuilt in _groups(session)] == [group]


async def _groups(session: AsyncSession):
    training = await find_training(session, "run")
    assert training is not None
    for group in await load_groups(session, training.id, 1):
        yield group


async def test_a_resumed_attempt_voids_what_will_run_again(url: str, session: AsyncSession) -> None:
    groups = [make_group(seed, group_id=f"group {seed}") for seed in range(3)]
    baseline = make_group(8, group_id="baseline")
    await record(
        url,
        start(),
        *source_events(baseline, step=0, phase="baseline"),
        EvaluationEnded(source=RolloutSource(phase="baseline", step=0), metrics={}),
        *source_events(groups[0]),
        step_end(groups[0]),
        CheckpointSaved(step=1, state_path="/1", sampler_path="/1"),
        *source_events(groups[1], step=2),
        step_end(groups[1], step=2),
        *source_events(make_group(9, group_id="cut short"), step=1, phase="eval"),
    )

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(start(first_step=2))
        await recorder.flush()
        training = (await session.scalars(select(Training))).one()
        assert (training.status, training.num_attempts, training.num_completed_steps) == ("running", 2, 1)
        assert [row.step for row in await load_steps(session, training.id)] == [1]
        assert run_sql(url, "SELECT phase FROM evals") == [("baseline",)]
        assert len((await session.scalars(select(RolloutRow))).all()) == 8  # two groups of three and one faulty each

        for event in (*source_events(groups[2], step=2), step_end(groups[2], step=2)):
            await recorder.record(event)

    assert await load_groups(session, training.id, 1) == [groups[0]]
    assert await load_groups(session, training.id, 2) == [groups[2]]
    assert await load_groups(session, training.id, 0, phase="baseline") == [baseline]


async def test_the_history_of_a_run_says_when_it_was_interrupted_and_when_it_went_on(url: str) -> None:
    await record(url, start())
    run_sql(url, "UPDATE trainings SET heartbeat_at = heartbeat_at - interval '3 hours'")
    (last_seen,) = run_sql(url, "SELECT heartbeat_at FROM trainings")
    await record(url, start(), TrainingEnded(status="failed", error="no device"))
    await record(url, start(), TrainingEnded(status="completed"))

    changes = run_sql(url, "SELECT old_status, new_status FROM status_history WHERE training_id = 1 ORDER BY id")
    assert changes == [
        (None, "running"),
        ("running", "interrupted"),  # killed: nobody said that it ended
        ("interrupted", "running"),
        ("running", "failed"),
        ("failed", "running"),
        ("running", "completed"),
    ]
    assert run_sql(url, "SELECT changed_at FROM status_history WHERE new_status = 'interrupted'") == [last_seen]


async def test_tasks_of_one_id_and_seed_with_other_instructions_are_kept_apart(url: str) -> None:
    source, groups = RolloutSource(phase="step", step=1), [make_group(seed, group_id=f"g{seed}") for seed in (1, 2)]
    tasks = (make_task(), replace(make_task(), instruction="Open the settings, please."))
    events: list[Event] = [start(), SourceStarted(source=source, tasks=tasks, group_size=3, policy_version=0)]
    for group, task in zip(groups, tasks, strict=True):  # all members but the first end without a start
        events += [replace(rollout_start(source, group, group.rollouts[0]), task=task)]
        events += [GroupEnded(source=source, group=group, advantages=None)]

    await record(url, *events)

    query = """
        SELECT DISTINCT group_id, instruction FROM rollouts JOIN tasks ON tasks.id = rollouts.task_pk
        JOIN groups ON groups.id = group_pk ORDER BY group_id
    """
    assert run_sql(url, query) == [("g1", "Open the settings."), ("g2", "Open the settings, please.")]


async def test_ending_a_training_ends_what_still_runs(url: str) -> None:
    group = make_group(1)
    source = RolloutSource(phase="step", step=1)

    await record(
        url,
        start(),
        SourceStarted(source=source, tasks=(make_task(),), group_size=3, policy_version=0),
        rollout_start(source, group, group.rollouts[0]),
        TrainingEnded(status="failed", error="loss is not finite"),
    )

    assert run_sql(url, "SELECT status, error FROM trainings") == [("failed", "loss is not finite")]
    assert run_sql(url, "SELECT status FROM steps") == [("failed",)]
    assert run_sql(url, "SELECT status FROM groups") == [("failed",)]
    assert run_sql(url, "SELECT status FROM rollouts") == [("cancelled",)]
    assert run_sql(url, "SELECT status FROM environments") == [("released",)]


async def test_a_full_disk_of_the_database_delays_and_the_log_says_so(
    url: str, session: AsyncSession, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter(["could not extend file: No space left on device", "Disk quota exceeded"])

    def write(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
        if (failure := next(failures, None)) is not None:
            raise OperationalError("INSERT", {}, psycopg.errors.DiskFull(failure))
        return write_events(connection, scope, events)

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, write=write) as recorder:
        await recorder.record(start())
    [training] = await latest_trainings(session)
    assert training.run_name == "run"
    assert "disk full: could not extend file: No space left on device" in caplog.text


async def test_an_absent_database_delays_but_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    socket_link = tmp_path / "s"  # the server listens on a new folder each time it starts, the recorder's URL must stay
    url = f"postgresql://cua_rl@/postgres?host={socket_link}"
    events = whole_run()
    caplog.set_level(logging.WARNING)

    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        socket_link.symlink_to(postgres.url.split("host=")[1])
        await migrate(url)
        recorder = await DatabaseRecorder(url, image_token_id=IMAGE_TOKEN).__aenter__()
        await recorder.record(events[0])
        await recorder.flush()
    for event in events[1:]:
        await recorder.record(event)
    flushed = asyncio.create_task(recorder.flush())
    await asyncio.wait([flushed], timeout=0.5)
    assert not flushed.done()
    socket_link.unlink()
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        socket_link.symlink_to(postgres.url.split("host=")[1])
        await flushed
        await recorder.__aexit__(None, None, None)
        async with open_sessions(url) as sessions, sessions() as session:
            training = await find_training(session, "run")
            assert training is not None
            assert await load_groups(session, training.id, 1) == [make_group(1)]
            assert training.status == "completed"

    assert len([line for line in caplog.messages if "database away" in line]) == 1
    assert len([line for line in caplog.messages if "database back" in line]) == 1


async def test_a_database_that_is_read_only_while_another_server_takes_over_is_waited_for(
    url: str, server_url: str, session: AsyncSession
) -> None:
    group = make_group(1)

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        run_sql(server_url, "ALTER DATABASE test SET default_transaction_read_only = on")
        for event in (start(), *source_events(group)):
            await recorder.record(event)
        flushed = asyncio.create_task(recorder.flush())
        await asyncio.wait([flushed], timeout=0.3)
        is_waiting = not flushed.done()
        run_sql(server_url, "ALTER DATABASE test RESET default_transaction_read_only")
        await flushed

    assert is_waiting
    assert await load_groups(session, recorder.scope.training_id or 0, 1) == [group]


async def test_a_lost_backend_in_the_middle_is_no_loss(url: str, session: AsyncSession) -> None:
    group = make_group(1)

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for number, event in enumerate((start(), *source_events(group))):
            await recorder.record(event)
            if number % 4 == 0:
                await recorder.flush()
                run_sql(url, DISCONNECT_OTHERS)

    assert [rebuilt async for rebuilt in _groups(session)] == [group]


async def test_a_transaction_waits_for_more_events_until_somebody_waits_for_it(url: str) -> None:
    sizes: list[int] = []

    def write(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
        sizes.append(len(events))
        return write_events(connection, scope, events)

    async with (
        asyncio.timeout(patience(60.0)),
        DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, write=write, linger_s=600.0) as recorder,
    ):
        for event in (start(), *source_events(make_group(1))):
            await recorder.record(event)
            await asyncio.sleep(0)
        await recorder.flush()

    assert len(sizes) == 1


async def test_a_transaction_that_the_server_takes_for_abandoned_is_written_again(url: str) -> None:
    """Otherwise the locks of a writer whose link was cut would stop all others; one that only slept goes on."""
    timeouts: list[object] = []

    def write(connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
        timeouts.append(connection.scalar(text("SHOW idle_in_transaction_session_timeout")))
        if len(timeouts) == 1:
            connection.execute(text("SET idle_in_transaction_session_timeout = 1"))
            while run_sql(url, OTHERS) != [(0,)]:
                time.sleep(0.01)
        return write_events(connection, scope, events)

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, write=write) as recorder:
        await recorder.record(start())

    assert timeouts == ["30s", "30s"]
    assert run_sql(url, "SELECT count(*) FROM trainings") == [(1,)]


async def test_a_refused_event_stops_the_run_instead_of_vanishing(url: str) -> None:
    recorder = await DatabaseRecorder(url, image_token_id=IMAGE_TOKEN).__aenter__()
    await recorder.record(start())
    await recorder.record(TurnTaken(rollout_id="never started", turn=make_group().rollouts[0].turns[0]))

    with pytest.raises(DatabaseError, match="expected rollout 'never started' to have started"):
        await recorder.flush()
    with pytest.raises(DatabaseError, match="never started"):
        await recorder.record(TrainingEnded(status="completed"))
    with pytest.raises(DatabaseError, match="never started"):
        await recorder.__aexit__(None, None, None)


async def test_a_value_that_is_no_json_is_refused_by_name(url: str) -> None:
    recorder = await DatabaseRecorder(url, image_token_id=IMAGE_TOKEN).__aenter__()
    bad = start()
    await recorder.record(type(bad)(run_name="r", log_path="l", config={"x": object()}, first_step=1, total_steps=1))

    with pytest.raises(DatabaseError, match="refused one of TrainingStarted"):
        await recorder.flush()
    with pytest.raises(DatabaseError, match="TrainingStarted"):
        await recorder.__aexit__(None, None, None)


async def test_every_verdict_is_kept_with_its_votes_and_its_prompt_once(url: str) -> None:
    await record(url, start(), *source_events(make_group(1)))

    rows = run_sql(
        url, "SELECT success, agreement, decides, num_prompt_tokens, cost_usd, reason FROM judgements ORDER BY id"
    )
    # members 1 and 2 with two votes of three; the fault without a verdict, and with what it cost
    reached = (True, 2 / 3, False, 2000, 0.1 + 0.2, "nul \x1a0;, \x1ad83d;")
    assert rows == [reached, reached, (None, 0.0, True, 2000, None, "503")]
    assert run_sql(url, "SELECT count(*), min(text) FROM judge_prompts") == [(1, "Decide.\x1a0;")]
