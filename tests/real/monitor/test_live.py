"""What happens is told as it happens, over a stream of events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import RolloutSource, TurnTaken
from tests.patience import IdleClock, patience
from tests.real.database.recorded import IMAGE_TOKEN, make_group, rollout_start, source_events, start
from tests.real.monitor.conftest import Shown

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def following(shown: Shown, run_id: str, last_event_id: str = "") -> AsyncGenerator[AsyncGenerator[Any]]:
    """Events of the run, from the greeting on."""
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    async with shown.client.stream("GET", "/api/events", params={"run_id": run_id}, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer.aiter_lines())


async def _events(lines: Any) -> AsyncGenerator[Any]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def _next(events: AsyncGenerator[Any], kind: str) -> Any:
    async with asyncio.timeout(patience(60)):
        async for event in events:
            if event["kind"] == kind:
                return event


async def test_a_turn_is_told_within_a_second_and_nothing_is_missed_by_who_comes_back(shown: Shown) -> None:
    group = make_group(seed=5, group_id="live")
    begun, *_ = source_events(group, 1)
    rollout = group.rollouts[0]
    source = RolloutSource(phase="step", step=1)
    async with AsyncExitStack() as stack:
        recorder = await stack.enter_async_context(DatabaseRecorder(shown.url, image_token_id=IMAGE_TOKEN))
        await recorder.record(replace(start(), run_name="live", log_path="/logs/live"))
        await recorder.flush()
        run_id = str(recorder.scope.training_id)
        events = await stack.enter_async_context(following(shown, run_id))
        hello = await _next(events, "hello")
        await recorder.record(begun)
        await recorder.record(rollout_start(source, group, rollout))
        started = await _next(events, "rollout")
        assert (started["rollout_id"], started["status"]) == (rollout.rollout_id, "running")
        clock = IdleClock()
        await recorder.record(TurnTaken(rollout_id=rollout.rollout_id, turn=rollout.turns[0]))
        told = await _next(events, "turn")
        took_s = clock.look()
    assert (told["rollout_id"], told["turn_index"], told["run_id"]) == (rollout.rollout_id, 0, run_id)
    assert took_s < 5.0  # a tenth of it on an idle machine
    turns = (await shown.json(f"/api/runs/{run_id}/rollouts/{rollout.rollout_id}"))["turns"]
    assert len(turns) == 1  # what is told is there to be asked for

    async with following(shown, run_id, hello["event_id"]) as events:
        again = await _next(events, "turn")
    assert again["rollout_id"] == rollout.rollout_id
    async with following(shown, run_id, "of-another-server-7") as events:
        assert (await anext(events))["kind"] == "reset"
