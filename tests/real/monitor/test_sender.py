"""A run is recorded and sent at once: the monitor's database must hold what the run's own database holds."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import make_writer_engine
from cua_rl.events import BatchTaken, Event, SourceStarted, TrainingEnded
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.sender import MonitorAddress, SendingRecorder
from scripts.check_ingest_outage import SAME
from tests.fakes import FakeRecorder
from tests.patience import patience
from tests.real.database.conftest import drop_database, run_sql, with_database
from tests.real.database.recorded import IMAGE_TOKEN, source_events, start, step_end
from tests.real.database.test_asynchronous import FIRST, SECOND, begun, ended
from tests.real.database.test_branches import grown_group
from tests.real.monitor.conftest import serving
from tests.real.monitor.events import make_step_events, with_images


def events() -> list[Event]:
    tree = with_images(grown_group())
    begun, *others = source_events(tree, 3)
    assert isinstance(begun, SourceStarted)
    # it began with fewer members than groups have at most, because another parent ended before its fork turn
    of_tree = [replace(begun, group_size=8), *others, step_end(tree, 3)]
    return [start(), *make_step_events(1), *make_step_events(2), *of_tree, TrainingEnded(status="completed")]


async def test_nothing_is_lost_or_doubled_while_the_monitor_is_away(server_url: str, url: str, tmp_path: Path) -> None:
    run_sql(server_url, "CREATE DATABASE sent TEMPLATE migrated")
    target = with_database(server_url, "sent")
    try:
        engine = make_writer_engine(target)
        _, token = create_project(engine, "p")
        engine.dispose()
        happened = events()
        half = len(happened) // 2
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(AsyncExitStack())
            port = await first.enter_async_context(serving(target))
            address = MonitorAddress(base_url=f"http://127.0.0.1:{port}", token=token)
            own = await stack.enter_async_context(DatabaseRecorder(url, image_token_id=IMAGE_TOKEN))
            sender = SendingRecorder(own, address, tmp_path, image_token_id=IMAGE_TOKEN)
            recorder = await stack.enter_async_context(sender)
            for event in happened[:half]:
                await recorder.record(event)
            await asyncio.wait_for(recorder.wait_until_sent(), patience(20))
            num_before = run_sql(target, "SELECT count(*) FROM turns")
            await first.aclose()
            for event in happened[half:]:
                await recorder.record(event)
            await asyncio.sleep(1.0)
            assert recorder.num_waiting_bytes > 0
            await stack.enter_async_context(serving(target, port))
            await asyncio.wait_for(recorder.wait_until_sent(), patience(30))
            await own.flush()
        assert num_before != run_sql(target, "SELECT count(*) FROM turns")
        for table, query in SAME.items():
            assert run_sql(target, query) == run_sql(url, query), table
    finally:
        drop_database(server_url, "sent")


async def test_an_asynchronous_run_has_the_same_steps_at_the_monitor(server_url: str, url: str, tmp_path: Path) -> None:
    run_sql(server_url, "CREATE DATABASE sent TEMPLATE migrated")
    target = with_database(server_url, "sent")
    first, second = (with_images(group) for group in (FIRST, SECOND))
    happened = [
        *(start(), begun(2), *ended(second, 2), begun(1), BatchTaken(step=1, group_ids=("group 1",)), step_end(second)),
        *(*ended(first, 2), begun(3), BatchTaken(step=2, group_ids=("group 0",)), step_end(first, step=2)),
    ]
    try:
        engine = make_writer_engine(target)
        _, token = create_project(engine, "p")
        engine.dispose()
        async with serving(target) as port, DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as own:
            address = MonitorAddress(base_url=f"http://127.0.0.1:{port}", token=token)
            async with SendingRecorder(own, address, tmp_path, image_token_id=IMAGE_TOKEN) as recorder:
                for event in happened:
                    await recorder.record(event)
                await asyncio.wait_for(recorder.wait_until_sent(), patience(30))
                await own.flush()
        steps = (
            "SELECT step, array_agg(group_id), steps.status, num_groups, num_ended_groups, cardinality(task_pks)"
            " FROM steps LEFT JOIN groups ON step_id = steps.id GROUP BY steps.id ORDER BY step"
        )
        history = (
            "SELECT step, new_status FROM status_history JOIN steps ON step_id = steps.id"
            " ORDER BY step, status_history.id"
        )
        for query in (*SAME.values(), steps, history):
            assert run_sql(target, query) == run_sql(url, query), query
    finally:
        drop_database(server_url, "sent")


async def test_a_resumed_run_is_counted_and_its_interruption_noted_at_the_monitor_too(url: str, tmp_path: Path) -> None:
    engine = make_writer_engine(url)
    _, token = create_project(engine, "p")
    engine.dispose()
    async with serving(url) as port:
        address = MonitorAddress(base_url=f"http://127.0.0.1:{port}", token=token)
        for number in range(3):
            async with SendingRecorder(
                FakeRecorder(), address, tmp_path / str(number), image_token_id=IMAGE_TOKEN
            ) as recorder:
                await recorder.record(start())
                for event in make_step_events(1):
                    await recorder.record(event)
                await asyncio.wait_for(recorder.wait_until_sent(), patience(30))

    assert run_sql(url, "SELECT num_attempts FROM trainings") == [(3,)]
    changes = run_sql(url, "SELECT new_status FROM status_history WHERE training_id IS NOT NULL ORDER BY id")
    assert changes == [("running",), *[("interrupted",), ("running",)] * 2]


async def test_what_did_not_arrive_waits_for_the_run_to_go_on(server_url: str, url: str, tmp_path: Path) -> None:
    engine = make_writer_engine(url)
    _, token = create_project(engine, "p")
    engine.dispose()
    nobody = MonitorAddress(base_url="http://127.0.0.1:9", token=token)
    async with SendingRecorder(
        FakeRecorder(), nobody, tmp_path, image_token_id=IMAGE_TOKEN, close_timeout_s=0.2
    ) as recorder:
        for event in events()[:-1]:
            await recorder.record(event)
    assert run_sql(url, "SELECT count(*) FROM trainings") == [(0,)]

    async with serving(url) as port:
        address = MonitorAddress(base_url=f"http://127.0.0.1:{port}", token=token)
        async with SendingRecorder(FakeRecorder(), address, tmp_path, image_token_id=IMAGE_TOKEN) as recorder:
            await asyncio.wait_for(recorder.wait_until_sent(), patience(30))

    assert run_sql(url, "SELECT num_completed_steps FROM trainings") == [(3,)]
