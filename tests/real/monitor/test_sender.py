"""A run is recorded and sent at once: the monitor's database must hold what the run's own database holds."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvicorn

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import make_writer_engine
from cua_rl.events import Event, TrainingEnded
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.security import AccessRules
from cua_rl.monitor.sender import MonitorAddress, SendingRecorder
from tests.fakes import FakeRecorder
from tests.real.database.conftest import run_sql, with_database
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.events import make_step_events

SAME = {
    "steps": "SELECT step, status, policy_version, trained_policy_version, num_datums, datums_sha256 FROM steps"
    " ORDER BY 1",
    "rollouts": "SELECT rollout_id, task_id, seed, member_index, status, num_turns, stop_reason, success, reward,"
    " advantage, answer, error, duration_s, max_turns FROM rollouts ORDER BY 1",
    "groups": "SELECT group_id, group_index, status, num_rollouts, num_faulty, num_successes, reward_mean"
    " FROM groups ORDER BY 1",
    "turns": "SELECT r.rollout_id, turn_index, response_id, prompt_token_ids, prompt_chunks::text, sampled_tokens,"
    " sampling_logprobs, training_logprobs, policy_version, stop, text, failure_kind, t.request::text, t.action::text,"
    " before_sha256, after_sha256, t.duration_s FROM turns t JOIN rollouts r ON r.id = t.rollout_pk ORDER BY 1, 2",
    "validations": "SELECT r.rollout_id, query, expected, actual, v.success FROM validations v"
    " JOIN rollouts r ON r.id = v.rollout_pk ORDER BY 1",
    "trainings": "SELECT run_name, status, total_steps, num_completed_steps FROM trainings",
}


@asynccontextmanager
async def serving(url: str, port: int = 0) -> AsyncGenerator[int]:
    """A monitor on a real port."""
    rules = AccessRules(write_token="w")
    app = make_app(Databases([open_database(url)]), rules)
    server = uvicorn.Server(uvicorn.Config(guard(app, rules), port=port, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def events() -> list[Event]:
    return [start(), *make_step_events(0), *make_step_events(1), TrainingEnded(status="completed")]


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
            await asyncio.wait_for(recorder.wait_until_sent(), 20)
            num_before = run_sql(target, "SELECT count(*) FROM turns")
            await first.aclose()
            for event in happened[half:]:
                await recorder.record(event)
            await asyncio.sleep(1.0)
            assert recorder.num_waiting_bytes > 0
            await stack.enter_async_context(serving(target, port))
            await asyncio.wait_for(recorder.wait_until_sent(), 30)
            await own.flush()
        assert num_before != run_sql(target, "SELECT count(*) FROM turns")
        for table, query in SAME.items():
            assert run_sql(target, query) == run_sql(url, query), table
    finally:
        run_sql(server_url, "DROP DATABASE sent WITH (FORCE)")


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
            await asyncio.wait_for(recorder.wait_until_sent(), 30)

    assert run_sql(url, "SELECT num_completed_steps FROM trainings") == [(2,)]
